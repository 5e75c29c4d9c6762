"""The passes of a pipeline stage and the messages between stages."""
