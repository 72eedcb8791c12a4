"""`python -u -m train.agent`: the agent of a node, which forks its ranks and watches over them.

It speaks the protocol of `contract.agent` on its standard input and output. Importing torch takes seconds and forking
does not: the agent has imported all that a rank needs, but has touched no device, for a fork can't use one after.
"""

import os
import signal

from train.resilience.preload import preload
from train.resilience.process import ASKING, leave


def main() -> int:
    """Run the agent; return its exit code."""
    channel = take_channel()
    # A request to stop waits until there is somebody to take it: it must not look as if the node were broken.
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    preload()
    # Imports torch: not before the channel is out of its reach.
    from train.resilience.node import Agent

    return Agent(*channel).run()


def take_channel() -> tuple[int, int]:
    """Move the channel away from the standard descriptors, where a library could write into it or a rank read it.

    Returns the descriptors of requests and replies; standard output is standard error from here on.
    """
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


if __name__ == "__main__":
    leave(main())
