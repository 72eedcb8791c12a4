"""How an update goes through the buckets, and how what computes next waits for what it has updated."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from train.offload.transfer import Event


class Progress:
    """One update: which buckets have their new weights under way, and whether it is over.

    Whoever waits gets the error that has ended the update, if one has. Waits have no limit of their own: what an
    update waits for has, and the watch on the pulse knows of a rank that hangs.
    """

    def __init__(self, buckets: int) -> None:
        self._sent: list[Future[Event] | None] = [Future() for _ in range(buckets)]
        self._over: Future[None] = Future()

    def sent(self, index: int, event: Event) -> None:
        """Say that the weights of a bucket are there when `event` has come."""
        sent = self._sent[index]
        assert sent is not None
        sent.set_result(event)

    def end(self, error: BaseException | None = None) -> None:
        """Say that nothing more will come, because all is done or because of an error."""
        for sent in self._sent:
            if error is not None and sent is not None and not sent.done():
                sent.set_exception(error)
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    def wait_for(self, index: int) -> None:
        """Return when the weights of a bucket are there."""
        sent = self._sent[index]
        if sent is not None:
            sent.result().synchronize()
            self._sent[index] = None

    def wait_for_all(self) -> None:
        """Return when all weights are there."""
        for index in range(len(self._sent)):
            self.wait_for(index)

    def wait(self) -> None:
        """Return when the update is over."""
        self._over.result()


class Worker:
    """Runs updates, one at a time: on a thread of its own, or where they are started."""

    def __init__(self, background: bool) -> None:
        self.background = background
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="update") if background else None
        self._closing = False
        self.busy_s = 0.0
        """Seconds that updates have taken."""

    def run(self, progress: Progress, steps: Iterable[Callable[[], None]]) -> None:
        """Carry out `steps` in turn and end `progress`."""
        if self._pool is None:
            self._carry_out(progress, steps)
        else:
            self._pool.submit(self._carry_out, progress, steps)

    def close(self) -> None:
        """Carry out no further step; returns when the one at work is over."""
        self._closing = True
        if self._pool is not None:
            self._pool.shutdown()

    def _carry_out(self, progress: Progress, steps: Iterable[Callable[[], None]]) -> None:
        began_s = time.perf_counter()
        try:
            for step in steps:
                if self._closing:
                    raise RuntimeError("the optimizer was closed within an update")
                step()
        except BaseException as error:
            progress.end(error)
        else:
            progress.end()
        finally:
            self.busy_s += time.perf_counter() - began_s
