"""No rank waits for ever: who gets no answer in time says for whom it waited, finds out who is missing, and leaves.

A hung operation can't be called off (a kernel of NCCL's waits on the device), so the process ends. Before that all
ranks are called: whoever waits leaves a note in the shared folder (`waits`), and who left none is the one to blame.
"""

import faulthandler
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from contract.exit_codes import ExitCode
from tools.nccl.measure.waits import HUNG, Wait, who_wrote
from train.resilience import pulse
from train.resilience.pulse import Phase

POLL_S = 0.1
CALL_POLL_S = 1.0
SUSPENDED_S = 5.0
"""A pause between two looks that only a stopped process explains."""
_CALL = "roll_call"

Place = tuple[str, int]
"""Name of a node, and number of a GPU there."""


class Watch:
    """The bound on every wait of this rank."""

    def __init__(
        self, folder: Path, rank: int, ranks: int, place: Callable[[int], Place], roll_call_s: float
    ) -> None:
        """`place`: where a rank is, by its number."""
        self._folder = folder
        self._rank, self._ranks = rank, ranks
        self._place = place
        self._roll_call_s = roll_call_s
        self._store: dist.Store | None = None
        self._number = 0
        self._step = ("start", "start")
        self._peers: tuple[int, ...] = ()
        self._looked = math.inf
        self._leaving = threading.Lock()
        self._stopped = threading.Event()
        self._alone = threading.Event()

    def start(self, store: dist.Store | None) -> None:
        """Begin to watch, in threads; `store`: a connection of their own to rank 0, through which ranks are called."""
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        if store is not None:
            self._store = store
            threading.Thread(target=self._listen, name="roll call", daemon=True).start()

    def answer_no_more(self) -> None:
        """Take no notice of others from here on: rank 0 may be gone because all is done."""
        self._alone.set()

    def stop(self) -> None:
        """Watch no more: what follows is no measurement."""
        self._alone.set()
        self._stopped.set()
        self._looked = math.inf

    def step(self, kind: str, what: str, limit_s: float, peers: Sequence[int] = ()) -> None:
        """What begins now may take `limit_s`; `kind` and `what`: see `waits.Wait`; `peers`: whom it waits for."""
        own = pulse.own()
        self._number += 1
        self._step, self._peers = (kind, what), tuple(peers)
        own.limits[Phase.STEP] = limit_s
        own.beat(Phase.STEP, self._number)

    def give_up(self, reason: str, *, late: bool = False) -> NoReturn:
        """Leave with 76, after the notes of all ranks have told who is missing.

        `late`: what this rank itself is in takes too long.
        """
        self._leaving.acquire()  # never released: one thread leaves, others wait for the end
        # Whichever thread wakes first in a process that had been stopped: it is this process that others miss.
        paused_s = time.monotonic() - self._looked
        stopped = paused_s > SUSPENDED_S
        if stopped:
            reason = f"this process itself was stopped for {paused_s:.0f} s"
        kind, what = self._step
        node, gpu = self._place(self._rank)
        waited_s = time.monotonic() - pulse.own().last().time_s
        peers: list[list[str | int]] = [list(self._place(peer)) for peer in self._peers]
        wait = Wait(self._rank, node, gpu, kind, what, reason, round(waited_s, 1), peers)
        # The folder may be what hangs.
        telling = threading.Thread(target=self._tell, args=(wait, late, stopped), daemon=True)
        telling.start()
        telling.join(2 * self._roll_call_s)
        os._exit(ExitCode.PEER_FAILED)

    def _tell(self, wait: Wait, late: bool, stopped: bool) -> None:
        try:
            wait.write(self._folder)
            threading.Thread(target=self._call, daemon=True).start()
            time.sleep(self._roll_call_s)
            missing = [self._rank] if stopped else set(range(self._ranks)) - who_wrote(self._folder)
            silent = sorted(missing)
            nodes = list(dict.fromkeys(self._place(rank)[0] for rank in silent))
            told = wait.found(silent, nodes)
            told.write(self._folder)
            # Who was merely called may be in something else that goes well.
            if late and not silent and wait.kind in ("round", "collective"):
                told.write(self._folder, HUNG)
        except OSError as error:
            self._say(f"could not write down for whom it waited ({error})")
            return
        whoever = ", ".join(f"rank {rank} on {self._place(rank)[0]}" for rank in silent[:8])
        whoever += f" and {len(silent) - 8} more" * (len(silent) > 8)
        whom = ", ".join(f"{node} GPU {gpu}" for node, gpu in wait.peers)
        self._say(
            f"gave up {wait.what} after {wait.waited_s:.0f} s: {wait.reason}"
            + f"; it waited for {whom}" * bool(whom)
            + (f"; gone or stuck: {whoever}" if silent else "; all ranks live")
        )

    def _say(self, sentence: str) -> None:
        # Not through sys.stderr, whose lock another thread may hold.
        os.write(2, f"trierarch: rank {self._rank} on {socket.gethostname()} {sentence}\n".encode())

    def _call(self) -> None:
        """Have all other ranks write down what they do."""
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(_CALL, str(self._rank))

    def _watch(self) -> None:
        self._looked = time.monotonic()
        while not self._stopped.wait(POLL_S):
            now = time.monotonic()
            last = pulse.own().last()
            if now - self._looked > SUSPENDED_S:
                self.give_up("this process stood still")
            self._looked = now
            if now - last.time_s > last.limit_s:
                faulthandler.dump_traceback(file=2, all_threads=True)
                self.give_up(f"no answer within {last.limit_s:.3g} s", late=True)

    def _listen(self) -> None:
        """Leave when another rank has given up, or when rank 0, where the store is, has gone."""
        assert self._store is not None
        reason = "another rank got no answer"
        while not self._alone.wait(CALL_POLL_S):
            try:
                if not self._store.check([_CALL]):
                    continue
            except RuntimeError:
                reason = "rank 0 is gone"
            if not self._alone.is_set():
                self.give_up(reason)
