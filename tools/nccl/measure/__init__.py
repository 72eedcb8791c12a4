"""Measure a job's network from its ranks, with NCCL on GPUs and gloo on CPUs."""
