"""How a supervisor and the agent on each of its nodes speak: JSON lines, requests on the agent's standard input,
replies on its standard output.

A supervisor (`slurm/`) starts one agent a node (`train/`), a parent that has imported torch already. The agent forks
the node's ranks as often as it is told to, watches over them, and ends them when its supervisor is gone.

Every message is one JSON object in one line with its kind under "kind". Requests:

    listen   ports: the first free of these ports is opened for rank 0's store, 0 means any; host: the address to
             open it at, all of the node's where it is left out ("127.0.0.1" when the job has one node).
    start    attempt: names this start in replies; task: see `Task`; config: path of the run's config.yaml;
             log: path of a rank's log with {rank} in it, appended to; world_size, nodes, node_rank, first_rank,
             local_size: who the ranks are; master: host:port of rank 0's store, which is the port that this
             agent was told to open when first_rank is 0; environment: added to the ranks' own, with the number
             of this start (`contract.variables.START`) in it; cpus: a list of CPU numbers for each local rank, or
             null to leave the ranks unbound; timeout_s: how long `Task.ALL_REDUCE` may take, 60 by default; program,
             arguments: what `Task.PROGRAM` runs.
    signal   number: sent to every rank.
    stacks   where every rank is, into its log.
    kill     end every rank at once.
    check    a health check of the node: marker: a file that must be visible with this text in it: {path, text};
             folders: {path: bytes that must be free}; temporary_bytes: the same for the node's own temporary folder;
             gpus: how many there must be, null for any number; gpu_memory_gb: the least that each must have, null
             for any.
    ping     how every rank is; also the sign that the supervisor lives.
    will     command, delay_s: what to run, so long after the supervisor was lost and the ranks were ended: the node
             that held the supervisor has died, and only the agents of the others can bring the job back. The agent
             stays until the command has ended, for Slurm ends a step's processes with it. Not run after `quit`.
    quit     end the ranks and leave: the work is done.

Replies:

    ready      host, pid, time_s, cpus: once, when the agent can fork ranks; `cpus`: the numbers that it may use.
    listening  port: null when none of the ports is free.
    exited     attempt, rank, code: of each rank, negative for a signal.
    stopping   signal: the agent was sent the signal of this name, which asks for a stop, and has asked its ranks.
    stacks     ranks: a list of {rank, pid, state, phase, step, silent_s, limit_s}; `state` is the process's in
               /proc, limit_s how long a rank may be silent in its phase.
    health     problems: sentences, none if all is well; time_s: of this node's clock.
    alive      time_s, ranks: as in `stacks`.
    error      message: a request that could not be carried out.
"""

import json
from enum import StrEnum
from typing import Any

LEASE_S = 60.0
"""An agent that has heard nothing of its supervisor for so long ends its ranks: they may run elsewhere by now."""

PING_EVERY_S = 1.0


class Task(StrEnum):
    """What the ranks are forked for."""

    TRAIN = "train"
    ALL_REDUCE = "all_reduce"
    """Find each other, add one number over all ranks, leave with 0: do these nodes reach each other?"""
    PROGRAM = "program"
    """Call `main(arguments)` of the module `program`, which watches over its ranks itself; its result is the code."""


class Request(StrEnum):
    """What a supervisor asks for."""

    LISTEN = "listen"
    START = "start"
    SIGNAL = "signal"
    STACKS = "stacks"
    KILL = "kill"
    CHECK = "check"
    PING = "ping"
    WILL = "will"
    QUIT = "quit"


class Reply(StrEnum):
    """What an agent tells."""

    READY = "ready"
    LISTENING = "listening"
    EXITED = "exited"
    STOPPING = "stopping"
    STACKS = "stacks"
    HEALTH = "health"
    ALIVE = "alive"
    ERROR = "error"


def encode(kind: Request | Reply, **fields: Any) -> bytes:
    """Return a message as one line."""
    return (json.dumps({"kind": kind, **fields}) + "\n").encode()


class Decoder:
    """Cuts a stream into messages; what is no message (a library's greeting) is kept apart."""

    def __init__(self) -> None:
        self._rest = b""
        self.noise: list[str] = []
        """Lines that are no message, for the log; the reader empties it."""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Take the next bytes of the stream; return the messages that they complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if isinstance(message, dict) and "kind" in message:
                messages.append(message)
            elif line.strip():
                self.noise.append(line.decode(errors="replace"))
        return messages
