"""Text as token ids."""
