"""How do the ranks get their data?  One rank of each replica reads steps ahead and hands them to the others."""
