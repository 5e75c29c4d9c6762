"""What a layout holds and how long its steps take, computed before it runs."""
