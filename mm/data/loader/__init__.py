"""How do the ranks get their data?  One rank of each replica reads steps ahead and sends them to the others."""
