"""Inside the job: one process that starts the ranks, watches them, and decides what to do when they end."""
