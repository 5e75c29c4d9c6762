"""What each family of models is called, and what is fixed in it; what it computes is in ``mm.model``."""
