"""The names and constants of each family of models; what it computes is in ``mm.model``."""
