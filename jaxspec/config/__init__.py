"""Settings: definitions, sources, and checks of their combinations."""
