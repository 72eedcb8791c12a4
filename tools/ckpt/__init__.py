"""Look into training checkpoints of any format: no GPU, no torch, no foreign code, memory bounded."""
