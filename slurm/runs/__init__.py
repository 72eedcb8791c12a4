"""Runs seen from a login node: their state, their logs, their end and their next try."""
