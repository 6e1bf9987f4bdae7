"""Smaller decoders as drafts."""
