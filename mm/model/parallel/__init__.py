"""Rows of a layer on several ranks: tensor, sequence and context parallelism."""
