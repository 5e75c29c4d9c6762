"""The user's settings, checked, and what follows from them."""
