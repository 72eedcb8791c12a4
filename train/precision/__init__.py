"""Which numbers are kept and computed in which type."""
