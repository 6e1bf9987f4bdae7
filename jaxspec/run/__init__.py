"""A run between two calls of its step."""
