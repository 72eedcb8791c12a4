"""Parallelism, applied to a model from outside."""
