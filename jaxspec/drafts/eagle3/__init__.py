"""EAGLE-3 heads as drafts."""
