"""A traced function as plain records, what its derivatives read, and what it repeats."""
