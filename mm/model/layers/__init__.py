"""The layers that any family is built from."""
