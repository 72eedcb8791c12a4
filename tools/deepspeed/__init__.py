"""DeepSpeed's JSON configuration, translated into settings of ours. Imports neither torch nor DeepSpeed."""
