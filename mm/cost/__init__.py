"""What a layout holds and how long it takes: memory and time, without running it."""
