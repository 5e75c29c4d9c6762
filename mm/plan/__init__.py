"""Memory and cost of a layout, computed before it runs."""
