"""Weights moved from one directory to another: what both mm-convert and the export of a run do."""
