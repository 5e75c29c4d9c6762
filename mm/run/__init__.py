"""A run: built, stepped, saved, measured."""
