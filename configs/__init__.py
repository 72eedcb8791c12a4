"""Hydra groups (the YAML files) and the one function that composes them."""
