"""For a person at a shell: the `trierarch` command and the tools behind it."""
