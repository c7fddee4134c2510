"""Finds hand-written checkpoints of little use in the traced program: one file per idea."""
