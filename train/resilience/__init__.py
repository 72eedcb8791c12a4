"""What keeps a run going: stop requests, ownership, the pulse and who watches it, the ranks of an agent."""
