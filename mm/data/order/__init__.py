"""Who trains on what, and when?  Pure functions of lengths, the seed and the settings: the same on every rank."""
