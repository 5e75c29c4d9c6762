"""Measurements: ratios between this trainer and its peers, taken side by side in one run."""
