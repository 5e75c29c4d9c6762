"""Ranks and what passes between them."""
