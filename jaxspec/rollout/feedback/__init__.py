"""What generation measures of itself: acceptance, and draft lengths chosen by it."""
