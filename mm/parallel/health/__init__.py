"""How ranks find each other, notice a hang and end together."""
