"""Analysis of compiled programs, and specifications of hardware."""
