"""Answers of the model: prompts, the forward pass token by token, and the files that answers are in."""
