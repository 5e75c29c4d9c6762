"""Damaged and hostile files of every kind, read as the commands read them."""
