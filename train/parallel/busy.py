"""How much of a step a rank computes: the rest of it is the bubble of its pipeline, and waiting."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

Mark = float | torch.cuda.Event


class BusyTime:
    """Time of one step of a pipeline, and that inside of the chunks that it computed.

    Only the last step that has run can be asked for: what is logged is that step's, not a mean over the steps since the
    last log. The time is that of forwards with the loss, and backwards with what ZeRO communicates in them, gathers of
    weights and reductions of gradients. All else is idle: waiting for a neighbour, handing over, the schedule's own
    work. The reduction at the end of a step, of schedules that split the backward, belongs to neither and is left out
    of the step; so are the gradients of tied embeddings, clipping and the optimizer, which come after it.

    On a GPU times are read from events between its kernels: marking them waits for nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._began: Mark | None = None
        self._ended: Mark | None = None
        self._chunks: list[tuple[Mark, Mark]] = []
        self._aside: list[tuple[Mark, Mark]] = []

    def begin(self) -> None:
        """Forget the step before and begin one."""
        self._chunks.clear()
        self._aside.clear()
        self._began = self._mark()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context of a chunk's work."""
        start = self._mark()
        yield
        self._chunks.append((start, self._mark()))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context of what belongs to the step, but not to the pipeline: neither work nor idle."""
        start = self._mark()
        yield
        self._aside.append((start, self._mark()))

    def end(self) -> None:
        """End the step."""
        self._ended = self._mark()

    def idle_share(self, group: dist.ProcessGroup) -> float:
        """Share of the last step, 0 to 1, in which the ranks of `group` computed nothing, on average. Collective.

        The step lasts as long as for the rank for which it is longest.
        """
        assert self._began is not None and self._ended is not None, "a step must have run"
        busy_s, aside_s = (
            sum(self._seconds(*span) for span in spans) for spans in (self._chunks, self._aside)
        )
        step_s = self._seconds(self._began, self._ended) - aside_s
        step = torch.tensor([busy_s, step_s], device=self._device)
        longest = step[1:].clone()
        dist.all_reduce(step, group=group)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
        return 1 - float(step[0]) / dist.get_world_size(group) / float(longest)

    def _mark(self) -> Mark:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Mark, end: Mark) -> float:
        if isinstance(start, torch.cuda.Event):
            assert isinstance(end, torch.cuda.Event)
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3
        assert isinstance(end, float)
        return end - start
