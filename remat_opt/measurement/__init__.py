"""Compiling for a device, attached or not, and reading what the compiler says it did."""
