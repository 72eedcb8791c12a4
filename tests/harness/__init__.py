"""Live gloo ranks for tests: `pool` runs in pytest, `worker` in each rank."""
