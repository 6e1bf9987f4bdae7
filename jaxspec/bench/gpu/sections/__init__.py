"""What is measured, one section after the other."""
