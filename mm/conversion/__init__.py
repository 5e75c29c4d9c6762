"""Copies weights from one directory to another, for mm-convert and for a run's export."""
