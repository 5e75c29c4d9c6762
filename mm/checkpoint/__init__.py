"""Formats of weight directories, for reading and writing."""
