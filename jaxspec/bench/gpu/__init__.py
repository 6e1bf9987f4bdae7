"""`bench gpu`: speculation on an accelerator, measured within ten minutes."""
