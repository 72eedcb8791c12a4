"""Pipeline schedules played from per-stage times: when each chunk is computed, what idles, and what is kept."""
