"""Benchmarks.

Each prints tables and a last line of JSON. An example is `python -m jaxspec.bench generate --model
DIR`.
"""
