"""Program and plan -> the same program as a chain of ``jax.checkpoint`` regions."""
