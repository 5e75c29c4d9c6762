"""Which rank trains on which samples, and when?  Pure functions of lengths, seed and settings: equal on every rank."""
