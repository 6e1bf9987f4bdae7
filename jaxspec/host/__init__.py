"""What a run does around its compiled programs."""
