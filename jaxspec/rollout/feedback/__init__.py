"""Measured acceptance, and draft lengths chosen by it."""
