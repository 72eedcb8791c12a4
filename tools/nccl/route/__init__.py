"""Paths, ring orders and cost models from a measured matrix. Pure functions, no torch."""
