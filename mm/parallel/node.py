"""What identifies a process beyond its number; see ``mm.process``."""

from mm.process import Identity, began, kill, node_id, own_identity

__all__ = ["Identity", "began", "kill", "node_id", "own_identity"]
