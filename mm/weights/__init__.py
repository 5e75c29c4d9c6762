"""The definition of every weight: names, fusion, cuts.  Pure."""
