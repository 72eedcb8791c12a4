"""The layouts among which a search chooses: every way to split a training over a number of ranks.

In two steps: a shape says who computes what (tp, pp, cp, micro-batch, schedule), its variants what is kept where (ZeRO,
copies of the state, recompute, offload). What the user has set stays. Left out is what is never better: tensor
parallelism over the network, sequences cut to less than `SHORTEST` tokens, GPipe and looped BFS where 1F1B and
interleaved 1F1B work (the same time for more memory), and recompute under schedules that split the backward pass, which
it undoes.
"""

import dataclasses
from collections.abc import Iterator, Set
from typing import TYPE_CHECKING, Any, TypeVar

from contract.errors import ConfigError
from tools.plan.own import varied
from train.layout.check import check_gpu
from train.layout.config import ContextMethod, ParallelConfig, Recompute
from train.layout.stages import SCHEDULES, Placement, check_pipeline
from train.offload.config import OffloadConfig, Tier

if TYPE_CHECKING:
    from train.config import TrainConfig

T = TypeVar("T")

SHORTEST = 1024
"""Tokens of a sequence that one rank takes at least under context parallelism: less is too little work to hide what
attention exchanges."""
LARGEST_MICRO_BATCH = 64
MOST_STAGES_PER_RANK = 8
LIGHTER = (Recompute.none, Recompute.selective, Recompute.full)
"""What is computed again, each choice for less memory and more time than the one before."""
DEFAULTS = ParallelConfig()
CHOSEN = tuple(
    field.name
    for field in dataclasses.fields(ParallelConfig)
    if field.name not in ("compile", "recompute_budget_gb", "split", "loss_parallel", "sequence_parallel")
)
"""Settings of `parallel` that a search chooses where they are free."""


class Space:
    """All layouts of `config` on `ranks` ranks that agree with `fixed`, names of settings of `parallel` (and "offload")
    whose values in `config` stay."""

    def __init__(self, config: "TrainConfig", ranks: int, ranks_per_node: int, fixed: Set[str]) -> None:
        self._config, self._ranks, self._ranks_per_node = config, ranks, ranks_per_node
        self.fixed = frozenset(fixed)
        self._given = config.parallel
        free = {name: getattr(DEFAULTS, name) for name in CHOSEN if name not in self.fixed}
        self._base = dataclasses.replace(config.parallel, **free)

    def shapes(self) -> Iterator[ParallelConfig]:
        """Yield every shape, with one copy of the state for each data-parallel rank (zero=0)."""
        model, sequence = self._config.model, self._config.data.sequence_length
        for tp in self._choices("tp", divisors(self._ranks)):
            if "tp" not in self.fixed and (self._ranks_per_node % tp or model.heads % tp):
                continue
            for cp in self._choices("cp", divisors(self._ranks // tp)):
                if "cp" not in self.fixed and cp > 1 and (sequence % cp or sequence // cp < SHORTEST):
                    continue
                for pp in self._choices("pp", divisors(self._ranks // tp // cp)):
                    if self._ranks % (tp * cp * pp) or pp > model.layers + 2:
                        continue
                    dp = self._ranks // (tp * cp * pp)
                    if "dp" in self.fixed and self._given.dp not in (None, dp):
                        continue
                    yield from self._in_degrees(tp, pp, cp, dp)

    def variants(self, shape: ParallelConfig) -> Iterator[tuple[int, int]]:
        """Yield who may share what in a shape: stages of ZeRO and degrees of dp_shard."""
        dp = self._ranks // (shape.tp * shape.pp * shape.cp)
        splits = shape.pp > 1 and SCHEDULES[shape.schedule].splits_backward
        for zero in self._choices("zero", [0, 1, 2, 3]):
            # Whole gradients wait for the end of a step there, as with 1.
            if "zero" not in self.fixed and splits and zero > 1:
                continue
            for shard in [1] if zero == 0 else divisors(dp):
                if zero > 0 and shard * shape.cp == 1 and "zero" not in self.fixed:
                    continue
                if "dp_replicate" in self.fixed and self._given.dp_replicate not in (None, dp // shard):
                    continue
                if "dp_shard" in self.fixed and self._given.dp_shard not in (None, shard):
                    continue
                yield zero, shard

    def variant(self, shape: ParallelConfig, zero: int, shard: int, recompute: Recompute) -> ParallelConfig:
        """Return a shape with one of its `variants`; degrees that follow from the others stay open, as people write."""
        copies = self._ranks // (shape.tp * shape.pp * shape.cp) // shard
        changes: dict[str, Any] = {"zero": zero, "recompute": recompute}
        if "dp_replicate" not in self.fixed:
            changes["dp_replicate"] = copies if zero > 0 and copies > 1 else None
        return dataclasses.replace(shape, **changes)

    def recomputes(self, shape: ParallelConfig) -> list[Recompute]:
        """Choices of what is computed again, the fastest first."""
        if "recompute" in self.fixed:
            return [self._given.recompute]
        splits = shape.pp > 1 and SCHEDULES[shape.schedule].splits_backward
        # Computing layers again undoes that split, which such a schedule is for.
        return [Recompute.none] if splits and "schedule" not in self.fixed else list(LIGHTER)

    @property
    def offloads(self) -> list[OffloadConfig]:
        """Choices of what leaves the device, the fastest first."""
        given = self._config.offload
        if "offload" in self.fixed:
            return [given]
        return [given, dataclasses.replace(given, optimizer=Tier.cpu)]

    def _choices(self, name: str, every: list[T]) -> list[T]:
        return [getattr(self._given, name)] if name in self.fixed else every

    def _in_degrees(self, tp: int, pp: int, cp: int, dp: int) -> Iterator[ParallelConfig]:
        base, heads = self._base, self._config.model.heads
        context = base.context
        if cp > 1 and "context" not in self.fixed and heads // tp % cp:
            context = ContextMethod.ring
        length = self._config.data.sequence_length // cp
        whole = base.sequence_parallel and (tp == 1 or length % tp == 0)
        degrees = dataclasses.replace(
            base,
            tp=tp,
            pp=pp,
            cp=cp,
            context=context if cp > 1 else base.context,
            sequence_parallel=whole,
        )
        if not self._computes_on_gpus(degrees):
            return
        for micro, count in self._micro_batches(dp):
            yield from self._schedules(dataclasses.replace(degrees, micro_batch_size=micro), count)

    def _computes_on_gpus(self, degrees: ParallelConfig) -> bool:
        try:
            check_gpu(varied(self._config, parallel=degrees))
        except ConfigError:
            return False
        return True

    def _micro_batches(self, dp: int) -> Iterator[tuple[int, int]]:
        """Yield sizes of a micro-batch, and how many of them a rank takes in a step."""
        steps, total = self._given.gradient_accumulation_steps, self._config.loop.global_batch_size
        if "gradient_accumulation_steps" not in self.fixed:
            steps = None
        if total is None:
            assert steps is not None, "the configuration is validated"
            powers = [2**power for power in range(LARGEST_MICRO_BATCH.bit_length())]
            yield from ((micro, steps) for micro in self._choices("micro_batch_size", powers))
            return
        if total % dp:
            return
        for micro in self._choices("micro_batch_size", divisors(total // dp)):
            count, rest = divmod(total // dp, micro)
            large = "micro_batch_size" not in self.fixed and micro > LARGEST_MICRO_BATCH
            if not rest and not large and steps in (None, count):
                yield micro, count

    def _schedules(self, shape: ParallelConfig, count: int) -> Iterator[ParallelConfig]:
        if shape.pp == 1:
            yield shape
            return
        for name in self._choices("schedule", list(SCHEDULES)):
            better = {"gpipe": "1f1b", "looped_bfs": "interleaved_1f1b"}.get(name)
            for stages in self._stages(name):
                one = dataclasses.replace(shape, schedule=name, stages_per_rank=stages)
                if not self._runs(one, count):
                    continue
                if better and "schedule" not in self.fixed:
                    other = dataclasses.replace(one, schedule=better)
                    if self._runs(other, count):
                        continue
                yield one

    def _stages(self, schedule: str) -> list[int | None]:
        placement = SCHEDULES[schedule].placement if schedule in SCHEDULES else Placement.single
        loops = placement is Placement.loop
        every: list[int | None] = list(range(2, MOST_STAGES_PER_RANK + 1)) if loops else [None]
        return self._choices("stages_per_rank", every)

    def _runs(self, shape: ParallelConfig, count: int) -> bool:
        if (shape.stages_per_rank or 1) * shape.pp > self._config.model.layers + 2:
            return False
        try:
            check_pipeline(shape, self._config.model.layers, count)
        except ConfigError:
            return False
        return True


def divisors(number: int) -> list[int]:
    """Every divisor, ascending."""
    small = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})
