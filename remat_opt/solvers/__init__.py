"""Solvers: one algorithm a file; they take numbers and give numbers."""
