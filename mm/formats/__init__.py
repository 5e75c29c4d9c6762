"""Every kind of directory of weights, both ways."""
