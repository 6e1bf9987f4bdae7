"""Accelerator kernels, each behind one function that has a plain twin."""
