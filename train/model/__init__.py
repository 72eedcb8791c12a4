"""Plain torch models; they know nothing of parallelism."""
