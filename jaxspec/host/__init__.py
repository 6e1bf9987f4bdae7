"""Host side of a run: config, memory, folders, prompts and scores."""
