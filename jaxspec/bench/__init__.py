"""Measurements, each as tables and a last line of JSON: `python -m jaxspec.bench generate --model
DIR`, and others."""
