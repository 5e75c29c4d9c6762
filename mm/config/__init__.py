"""What the user said, and what follows from it."""
