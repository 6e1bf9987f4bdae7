"""Hugging Face checkpoints: their names, layouts and configs, read and written."""
