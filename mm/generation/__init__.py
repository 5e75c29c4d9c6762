"""Answers of the model: prompts, the forward pass token by token, and files of answers."""
