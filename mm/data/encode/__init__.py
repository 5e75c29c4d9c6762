"""What does the model see of a sample?  Token ids, labels, positions and patches."""
