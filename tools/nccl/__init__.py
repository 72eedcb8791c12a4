"""Test a machine's network: measure it, find the bad part, order the ranks, choose how to reduce."""
