"""Finds hand-written checkpoints that do nothing, in the traced program: one file per idea."""
