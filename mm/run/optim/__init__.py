"""The optimizer of a stage and one update of its weights."""
