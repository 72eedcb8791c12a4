"""One rank of the pool: a process that runs one call after another, each from the same clean state."""

import faulthandler
import functools
import gc
import math
import os
import pickle
import random
import signal
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.tensor._random
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

DUMP_SIGNAL = signal.SIGQUIT
"""Makes a rank write its Python stack; neither torch nor the trainer uses this signal."""

_RESET_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
_ORPHAN_LIMIT_S = 10
_GROUP_LIMIT_S = 60


@dataclass(frozen=True)
class Call:
    """What a rank is asked to run; `payload` is the pickled (function, args, kwargs)."""

    payload: bytes
    rank: int
    size: int
    store: str
    seed: int
    environment: dict[str, str]
    folder: str
    timeout_s: float


@dataclass(frozen=True)
class Reply:
    """The pickled return value, or why there is none; an empty reply says that the rank is clean again."""

    result: bytes = b""
    failure: str = ""

    @property
    def failed(self) -> bool:
        """Whether the rank raised or died."""
        return bool(self.failure)


def serve(connection: Connection, log_path: Path, stack_path: Path) -> None:
    """Run calls from `connection` until it closes. Never returns: gloo can abort an ordinary exit."""
    os.setsid()  # the pool can kill the children of a rank with it, and Ctrl-C reaches pytest alone
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    stack = os.open(stack_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.enable(stack)
    faulthandler.register(DUMP_SIGNAL, stack)
    caches = _lru_caches()
    gc.freeze()  # torch's own objects need no collection: keeps the one after each call short
    while True:
        try:
            call: Call = connection.recv()
            os.ftruncate(log, 0)
            os.ftruncate(stack, 0)
            _reset(call)
            reply = _run(call)
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send(reply)
            # The group must live until every rank has returned: the others may still talk to this one.
            connection.recv()
            _clean_up(caches)
            connection.send(Reply())
        except (EOFError, ConnectionError):
            os._exit(0)


def _lru_caches() -> list[Any]:
    """Every `lru_cache` of torch.distributed's, those of methods too."""
    return [
        found
        for found in gc.get_objects()
        if isinstance(found, functools._lru_cache_wrapper)
        and str(found.__module__).startswith("torch.distributed")
    ]


def _run(call: Call) -> Reply:
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{call.store}",
            rank=call.rank,
            world_size=call.size,
            # Longer than the pool's own limit, which gives the better message.
            timeout=timedelta(seconds=call.timeout_s + _GROUP_LIMIT_S),
        )
        function, args, kwargs = pickle.loads(call.payload)
        return Reply(result=cloudpickle.dumps(function(*args, **kwargs)))
    except BaseException as error:  # torch's CheckpointException and SystemExit are no Exceptions
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        return Reply(failure="".join(traceback.format_exception(type(error), error, frames)))


def _reset(call: Call) -> None:
    """Give the call the caller's environment and folder, and torch's defaults."""
    os.chdir(call.folder)
    os.environ.clear()
    os.environ.update(call.environment, OMP_NUM_THREADS="1")
    for number in _RESET_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    # A rank that hangs must not outlive a pytest that was killed.
    signal.alarm(math.ceil(call.timeout_s) + _ORPHAN_LIMIT_S)
    random.seed(call.seed)
    np.random.seed(call.seed % 2**32)
    torch.manual_seed(call.seed)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)


def _clean_up(caches: list[Any]) -> None:
    """Destroy the groups and forget what torch keeps about them."""
    if dist.is_initialized():
        dist.destroy_process_group()
    # DTensor's caches hold device meshes, and with them groups that are gone, each with threads of its own.
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    clear_redistribute_planner_cache()
    for cache in caches:
        cache.cache_clear()
    torch.distributed.tensor._random._rng_tracker = None
    gc.collect()
    signal.alarm(0)
