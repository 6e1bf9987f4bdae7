"""What a compiled program says of itself, and the hardware it may be compiled for without it."""
