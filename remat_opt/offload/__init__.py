"""Chains of stages whose values may move to host memory: terms, equations and a simulator."""
