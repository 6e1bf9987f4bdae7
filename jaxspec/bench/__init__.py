"""Benchmarks.

Each prints its results, and a last line of JSON. An example is `python -m jaxspec.bench generate
--model DIR`.
"""
