"""Look-up in existing text as drafts."""
