"""What a program has of its machine: files, processes, signals, the terminal."""
