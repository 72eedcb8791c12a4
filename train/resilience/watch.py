"""The watchdog of a rank that no agent watches: when the pulse is silent for too long, it ends the process.

Without it one rank that hangs makes all others wait until the collectives give up, and then nobody knows where it was.
"""

import faulthandler
import os
import socket
import threading
import time

from contract.exit_codes import ExitCode
from contract.run_folder import Event, RunFolder
from train.resilience.pulse import Beat, Pulse

POLL_S = 1.0
SUSPENDED_S = 10.0
"""A pause between two looks that only a suspended process explains."""
HELD_S = 60.0
"""How much longer than its limit a rank lives that holds the interpreter's lock, so that this thread can't run."""
EVENT_S = 2.0


def start(pulse: Pulse, run: RunFolder, rank: int) -> None:
    """Watch the pulse of this rank in a thread; silent for too long it leaves with 76, its stacks on stderr."""
    threading.Thread(target=_watch, args=(pulse, run, rank), name="watch", daemon=True).start()


def _watch(pulse: Pulse, run: RunFolder, rank: int) -> None:
    looked = awake_since = time.monotonic()
    while True:
        now = time.monotonic()
        if now - looked > SUSPENDED_S:
            awake_since = now
        looked = now
        last = pulse.last()
        silent_s = now - max(last.time_s, awake_since)
        left_s = last.limit_s - silent_s
        if left_s <= 0:
            _end(last, silent_s, run, rank)
        # A thread of C code, which needs no lock: it ends the process with 1.
        faulthandler.dump_traceback_later(max(0.0, left_s) + HELD_S, exit=True, file=2)
        time.sleep(min(POLL_S, max(0.01, left_s)))


def _end(last: Beat, silent_s: float, run: RunFolder, rank: int) -> None:
    sentence = (
        f"hung: no sign of life for {silent_s:.0f} s in phase {last.phase}, step {last.step} (its limit is "
        f"{last.limit_s:g} s); the stacks follow"
    )
    # Not through sys.stderr, whose lock the stuck thread may hold.
    os.write(2, f"trierarch: rank {rank} on {socket.gethostname()} {sentence}\n".encode())
    faulthandler.dump_traceback(file=2, all_threads=True)
    fields = {
        "phase": last.phase,
        "step": last.step,
        "silent_s": round(silent_s, 1),
        "code": ExitCode.PEER_FAILED,
    }
    tell = threading.Thread(
        target=run.try_event,
        args=(Event.HUNG,),
        kwargs={"rank": rank, "node": socket.gethostname(), **fields},
    )
    # The run folder may be what hangs.
    tell.daemon = True
    tell.start()
    tell.join(EVENT_S)
    os._exit(ExitCode.PEER_FAILED)
