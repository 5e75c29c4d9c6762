"""The command ``mm-data``: check, measure, show and generate data files, independently of training."""
