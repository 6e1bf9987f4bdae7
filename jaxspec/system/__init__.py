"""Files, signals, the terminal and the output of a run."""
