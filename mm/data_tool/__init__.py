"""The command ``mm-data``: data files checked, measured, shown, converted and made up, apart from training."""
