"""Kernels, each with an equivalent in plain JAX."""
