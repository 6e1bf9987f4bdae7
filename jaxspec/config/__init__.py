"""Settings: what they are, where they come from, and what goes together."""
