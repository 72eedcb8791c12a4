"""Parallelism, applied to a model from outside. Read `apply.py` first: it holds the one fixed order."""
