"""What is known of a dataset before it is trained on?  Every record is checked and measured once, and that is kept."""
