"""Comparison of mathematical answers."""
