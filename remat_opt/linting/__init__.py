"""Hand-written checkpoints that do nothing, found in the traced program: one file for each idea."""
