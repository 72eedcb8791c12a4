"""Stop requests and ownership of a run."""
