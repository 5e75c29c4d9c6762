"""One pipeline stage of a model: what any family needs, and a folder for each family."""
