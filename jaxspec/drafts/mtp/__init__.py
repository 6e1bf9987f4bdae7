"""Layers for multi-token prediction as drafts."""
