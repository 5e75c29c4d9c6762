"""The command ``mm-convert``; the formats and conversions are in ``mm.checkpoint``."""
