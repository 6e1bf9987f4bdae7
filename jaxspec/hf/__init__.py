"""Names, layouts and configs of Hugging Face checkpoints."""
