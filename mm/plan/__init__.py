"""What a layout holds and costs, before it runs."""
