"""Program and plan -> the same decision as ordinary JAX code, as text."""
