"""The command ``mm-data``: check, measure, show, convert and generate data files, independently of training."""
