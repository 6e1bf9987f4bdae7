"""A run that generates batches while it learns from earlier ones."""
