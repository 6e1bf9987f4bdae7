"""Metrics of a run: their names and meanings, and the files that hold them."""
