"""The planner: how much memory, how fast, and which layout, by arithmetic and a few calibrated constants. No torch."""
