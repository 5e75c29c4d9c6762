"""From raw JSON and pictures to packed microbatches."""
