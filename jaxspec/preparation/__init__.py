"""Policy and draft before the first call of a run."""
