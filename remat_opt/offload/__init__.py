"""Chains of stages whose values may move to host memory: words, equations and a simulator."""
