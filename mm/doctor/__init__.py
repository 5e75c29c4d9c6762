"""``mm-doctor``: what a run would find on this machine."""
