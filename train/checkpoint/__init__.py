"""Checkpoints: save, publish, restore, retain."""
