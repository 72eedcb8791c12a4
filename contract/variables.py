"""Environment variables that a launcher sets for the ranks."""

TERMINAL = "TRIERARCH_TERMINAL"
"""Whether the ranks' output ends on a terminal ("1") or not ("0").

mpirun gives a rank a pseudo-terminal whatever its own output is, so a rank cannot find out by itself.
"""

MASTER_SUFFIX = "TRIERARCH_MASTER_SUFFIX"
"""What to append to rank 0's host name to get its address on the fast network ("i" on JUWELS)."""
