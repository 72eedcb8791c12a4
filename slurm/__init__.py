"""Everything that talks to the scheduler: login nodes import this, so nothing here imports torch."""
