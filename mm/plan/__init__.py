"""Memory and sizes of a layout, computed before it runs."""
