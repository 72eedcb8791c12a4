"""Environment variables that a launcher sets for the ranks."""

TERMINAL = "TRIERARCH_TERMINAL"
"""Set to "1" where somebody turns marked lines (`PROGRESS_MARK`) into a live one.

A rank cannot find out by itself: mpirun gives it a pseudo-terminal whatever its own output is.
"""

PROGRESS_MARK = "\x1e"
"""Begins each line of a rank's output that a terminal should show as one live line."""

DIE_WITH_LAUNCHER = "TRIERARCH_DIE_WITH_LAUNCHER"
"""Set to "1" where a rank must not outlive the process that started it.

Ranks leave MPI before they train, so they do not notice that mpirun was killed; under Slurm the step does it.
"""

MASTER_SUFFIX = "TRIERARCH_MASTER_SUFFIX"
"""What to append to rank 0's host name to get its address on the fast network ("i" on JUWELS)."""

START = "TRIERARCH_START"
"""How many times the training was started before in this start of the job: a supervisor restarts it in place."""

AGENT = "TRIERARCH_AGENT"
"""Set to "1" in ranks that an agent has forked (see `contract.agent`): it names them and watches over them."""

LISTENER = "TRIERARCH_LISTENER"
"""The file descriptor on which rank 0's store listens, inherited from the agent that opened it."""
