"""Comparison of target and draft over the vocabulary, in a plain and a fast form."""
