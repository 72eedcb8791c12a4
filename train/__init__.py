"""The trainer: what runs in every rank."""
