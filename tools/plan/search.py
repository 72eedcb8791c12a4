"""The search for the fastest layout that fits: best first, by bounds, without leaving out any that could be better.

A shape (who computes what) has a time that no variant of it (what is kept where) can be below. Shapes are looked at in
the order of that bound; the first give times that the bounds of all others are held against, so that only a part of the
layouts is predicted in full. `tests/unit/test_plan_search.py` compares with trying everything.

Two rows of the result differ in their degrees (tp, pp, cp); each is the fastest of its degrees. Of layouts that are
equally fast comes first the one with less memory, then that of smaller tp, pp, cp, micro-batch, zero, then by name.
"""

import dataclasses
import math
from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from contract.errors import ConfigError
from tools.plan.case import Case, Machine, Number
from tools.plan.constants import Constants, constants
from tools.plan.own import case_of, model_of, varied
from tools.plan.room import Part, Room, Rooms, StateBytes, least_state_bytes
from tools.plan.space import Space
from tools.plan.step import Step, predict_step
from train.layout.check import fits, lay_out
from train.layout.config import ParallelConfig, Recompute
from train.layout.dims import ParallelDims, is_sharded
from train.layout.stages import Placement, schedule_of, stages_per_rank
from train.model.config import parameter_count
from train.offload.config import OffloadConfig

if TYPE_CHECKING:
    from train.config import TrainConfig

Degrees = tuple[int, int, int]
FILL = 0.75
"""Of the time in which a pipeline of equal stages fills and empties: what a bound counts, as stages may differ."""
FILL_FORWARD = 0.2
"""The same where gradients of weights fill the emptying: of all three parts of a chunk the forward is about a third."""
OF_STATE = ("dp", "copies")
"""Axes over which gradients and weights travel."""
OF_STAGES = ("tp", "cp")
"""Axes whose communication is in the times of stages."""
PLAIN = "1f1b"
"""A schedule whose bubble has a formula; what its ranks compute and send is the same under all."""
UNKNOWN = Room(0, {}, 0.0, 0.0, 0.0, 0.0)
ROUNDING = 1e-9
"""Of times that are added up in another order."""


@dataclass(frozen=True)
class Plan:
    """A layout with what it is predicted to take."""

    config: "TrainConfig"
    """With the layout written into it."""
    dims: ParallelDims
    case: Case
    step: Step
    room: Room

    @property
    def parallel(self) -> ParallelConfig:
        """The layout."""
        return self.config.parallel

    @property
    def degrees(self) -> Degrees:
        """By which rows of a result differ."""
        return self.dims.tp, self.dims.pp, self.dims.cp

    @property
    def seconds_per_token(self) -> float:
        """By which plans are compared; the same as by the time of a step where the batch is given."""
        return self.step.total_s / self.case.tokens

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Throughput."""
        return self.case.tokens / self.step.total_s / self.dims.ranks

    @property
    def mfu(self) -> float:
        """Model FLOPs, nothing computed again, as a share of the peak of bf16 (of fp32 where products are in it)."""
        return self.case.model_flops / (self.step.total_s * peak_flops(self.case))

    @property
    def order(self) -> tuple[object, ...]:
        """Plans in the order in which they are proposed."""
        layout, parallel = self.case.layout, self.parallel
        return (
            float(f"{self.seconds_per_token:.9e}"),
            round(self.room.device_bytes),
            *(layout.tp, layout.pp, layout.cp, layout.micro_batch, layout.zero, layout.sharers, layout.vpp),
            *(layout.schedule, layout.recompute, layout.offload_optimizer, parallel.context),
        )


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    plans: tuple[Plan, ...]
    """The best, each with other degrees."""
    shapes: int
    """Ways to split the work."""
    predicted: int
    """Layouts whose step was predicted in full."""
    tightest: Plan | None
    """If nothing fits: the layout that came nearest."""


def search(
    config: "TrainConfig",
    machine: Machine,
    fixed: Set[str] = frozenset(),
    top: int = 5,
    known: Constants | None = None,
) -> Found:
    """Find the `top` best layouts of `config` on `machine`.

    `fixed`: names of settings of `parallel` whose values in `config` stay, and "offload" if that section stays.
    Needs `model.vocab_size`, else `ConfigError`.
    """
    return _Search(config, machine, fixed, top, known or constants()).run()


def evaluate(
    config: "TrainConfig", machine: Machine, known: Constants | None = None, rooms: Rooms | None = None
) -> Plan:
    """Predict the layout that `config` has; raises `ConfigError` for one that cannot work."""
    known = known or constants()
    changed = varied(config)
    dims = lay_out(changed, machine.gpus, machine.gpus_per_node, on_gpus=True)
    case = case_of(changed, dims, machine)
    rooms = rooms or Rooms(machine.gpu.usable_bytes, known)
    return Plan(changed, dims, case, predict_step(case, known), rooms.of(changed, dims))


def peak_flops(case: Case) -> float:
    """Of a GPU, what MFU is a share of."""
    gpu = case.machine.gpu
    tflops = {Number.fp32: gpu.fp32_tflops, Number.tf32: gpu.bf16_tflops / 2}.get(
        case.number, gpu.bf16_tflops
    )
    return tflops * 1e12


class _Search:
    def __init__(
        self, config: "TrainConfig", machine: Machine, fixed: Set[str], top: int, known: Constants
    ) -> None:
        self.config, self._machine, self._known, self._top = config, machine, known, top
        self._space = Space(config, machine.gpus, machine.gpus_per_node, fixed)
        self._model = model_of(config.model)
        self.parameters = parameter_count(config.model)
        self.waiting = (1 + known.straggler * math.log2(machine.nodes)) * (1 - ROUNDING)
        """By which waiting for the slowest node lengthens all that a step takes besides, at least."""
        self.rooms = Rooms(machine.gpu.usable_bytes, known)
        self._layers: dict[tuple[int, int, int, bool, bool, Recompute], tuple[float, float]] = {}
        self._best: dict[Degrees, Plan] = {}
        self._worst_s = math.inf
        """Seconds a token beyond which nothing can get into the result."""
        self._tightest: tuple[float, TrainConfig] | None = None
        self._predicted = 0

    def run(self) -> Found:
        """Look at shapes in the order of their bounds."""
        # Bubbles of schedules that split the backward are simulated: the others first, to hold these against.
        waiting: dict[bool, list[tuple[float, int, ParallelConfig]]] = {False: [], True: []}
        for number, shape in enumerate(self._space.shapes()):
            bound = self.bound(shape, self._space.recomputes(shape)[0])
            waiting[schedule_of(shape).splits_backward].append((bound, number, shape))
        for shapes in waiting.values():
            for bound, _, shape in sorted(shapes, key=lambda one: one[:2]):
                if bound > self._worst_s:
                    break
                if bound <= self.limit((shape.tp, shape.pp, shape.cp)):
                    self._expand(shape)
        plans = sorted(self._best.values(), key=lambda plan: plan.order)[: self._top]
        tightest = None
        if not plans and self._tightest is not None:
            tightest = evaluate(self._tightest[1], self._machine, self._known, self.rooms)
        return Found(tuple(plans), sum(map(len, waiting.values())), self._predicted, tightest)

    def _note(self, plan: Plan) -> None:
        """Keep a plan that fits, if it is the best of its degrees."""
        best = self._best.get(plan.degrees)
        if best is None or plan.order < best.order:
            self._best[plan.degrees] = plan
            times = sorted(one.seconds_per_token for one in self._best.values())
            if len(times) >= self._top:
                self._worst_s = times[self._top - 1] * (1 + ROUNDING)

    def limit(self, degrees: Degrees) -> float:
        """Seconds a token that a layout of these degrees must be below to get into the result."""
        own = self._best.get(degrees)
        return self._worst_s if own is None else min(self._worst_s, own.seconds_per_token * (1 + ROUNDING))

    def bound(self, shape: ParallelConfig, recompute: Recompute) -> float:
        """Seconds a token of which computing, and what layers wait for, take no less in any variant of a shape."""
        of_layer_s, of_head_s = self._parts(shape, recompute)
        count = self.micro_batches(shape)
        # On the slowest rank of the pipeline not less than on average; `FILL` of what the others add before and after.
        sum_s = self._model.layers * of_layer_s + of_head_s
        least_s = sum_s * count / shape.pp
        if shape.pp > 1:
            least_s += _fill(shape, recompute) * sum_s * (shape.pp - 1) / shape.pp / stages_per_rank(shape)
        tokens = count * shape.micro_batch_size * self.config.data.sequence_length * self._dp(shape)
        return least_s / tokens * self.waiting

    def _parts(self, shape: ParallelConfig, recompute: Recompute) -> tuple[float, float]:
        """Seconds of a micro-batch in one layer and in the head, from models of two layers and of one."""
        count = self.micro_batches(shape)
        key = (shape.tp, shape.micro_batch_size, shape.cp, shape.sequence_parallel, count > 1, recompute)
        if key not in self._layers:
            again = Recompute.none if recompute is Recompute.auto else recompute
            case = self._case(dataclasses.replace(shape, recompute=again))
            layout = dataclasses.replace(
                case.layout, pp=1, vpp=1, split=None, schedule="1f1b", micro_batches=min(2, count)
            )
            two_s, one_s = (
                predict_step(
                    dataclasses.replace(
                        case, layout=layout, model=dataclasses.replace(self._model, layers=layers)
                    ),
                    self._known,
                )
                .stages[0]
                .total_s
                for layers in (2, 1)
            )
            self._layers[key] = two_s - one_s, 2 * one_s - two_s
        return self._layers[key]

    def _case(self, shape: ParallelConfig) -> Case:
        return case_of(varied(self.config, parallel=shape), self.dims(shape), self._machine, self._model)

    def micro_batches(self, shape: ParallelConfig) -> int:
        """That a rank takes in a step."""
        total = self.config.loop.global_batch_size
        if total is None:
            return shape.gradient_accumulation_steps or 1
        return total // (self._dp(shape) * shape.micro_batch_size)

    def dims(self, shape: ParallelConfig) -> ParallelDims:
        """Degrees of a shape in which nobody shares any state."""
        return ParallelDims(pp=shape.pp, dp_replicate=self._dp(shape), cp=shape.cp, tp=shape.tp)

    def _dp(self, shape: ParallelConfig) -> int:
        return self._machine.gpus // (shape.tp * shape.pp * shape.cp)

    def _expand(self, shape: ParallelConfig) -> None:
        """Look at the variants of a shape; keep the best that fits."""
        common = _Common(self, shape, self._space.offloads)
        for zero, shard in self._space.variants(shape):
            lighter = self._space.recomputes(shape)
            for offload_index, offload in enumerate(self._space.offloads):
                if not common.has_room(zero, shard, offload_index):
                    continue
                # With more recompute, or offload beside it, a layout is slower: the first that fits is the best.
                for index, recompute in enumerate(lighter):
                    if common.is_too_slow(recompute):
                        if recompute is self._space.recomputes(shape)[0]:
                            return
                        lighter = lighter[:index]
                        break
                    if not common.may_fit(zero, shard, offload_index, recompute):
                        continue
                    if common.is_surely_too_slow(recompute):
                        lighter = lighter[:index]
                        break
                    parallel = self._space.variant(shape, zero, shard, recompute)
                    if self._settles(varied(self.config, parallel=parallel, offload=offload), common.degrees):
                        lighter = lighter[:index]
                        break
                if not lighter:
                    break

    def _settles(self, config: "TrainConfig", degrees: Degrees) -> bool:
        """Take note of a layout if it works, fits and is better; False if one with less memory is to be tried."""
        plan = self.predicted(config, ParallelDims.of(config.parallel, self._machine.gpus))
        if plan.seconds_per_token > self.limit(degrees):
            return True
        if _laid_out(config, self._machine) is None:
            return False
        plan = dataclasses.replace(plan, room=self.rooms.of(config, plan.dims))
        if plan.room.fits:
            self._note(plan)
        elif self._tightest is None or plan.room.device_bytes < self._tightest[0]:
            self._tightest = plan.room.device_bytes, config
        return plan.room.fits

    def predicted(self, config: "TrainConfig", dims: ParallelDims, schedule: str | None = None) -> Plan:
        """Predict a layout's step, its memory left open; with `schedule` as if that were its own."""
        self._predicted += 1
        case = case_of(config, dims, self._machine, self._model)
        if schedule is not None:
            case = case.on(dataclasses.replace(case.layout, schedule=schedule))
        return Plan(config, dims, case, predict_step(case, self._known), UNKNOWN)

    def leanest(self, shape: ParallelConfig) -> Recompute:
        """The choice of recompute that keeps least."""
        return self._space.recomputes(shape)[-1]

    def note_tight(
        self,
        least_bytes: float,
        shape: ParallelConfig,
        zero: int,
        shard: int,
        recompute: Recompute,
        offload: OffloadConfig,
    ) -> None:
        """Remember of what does not fit the layout that needs least."""
        if self._tightest is not None and least_bytes >= self._tightest[0]:
            return
        parallel = self._space.variant(shape, zero, shard, recompute)
        config = varied(self.config, parallel=parallel, offload=offload)
        if _laid_out(config, self._machine) is not None:
            self._tightest = least_bytes, config


class _Common:
    """What the variants of a shape share, each reckoned when it is asked for."""

    def __init__(self, search: _Search, shape: ParallelConfig, offloads: list[OffloadConfig]) -> None:
        self._search, self._shape, self._offloads = search, shape, offloads
        self.degrees: Degrees = (shape.tp, shape.pp, shape.cp)
        self._splits = shape.pp > 1 and schedule_of(shape).splits_backward
        self._dims = search.dims(shape)
        self._available_bytes = search.rooms.available_bytes(self._dims)
        self._bounds: dict[Recompute, float] = {}
        self._times: dict[Recompute, float] = {}
        self._parts: dict[tuple[Recompute, bool], list[Part]] = {}
        self._states: dict[tuple[int, int], tuple[StateBytes, bool]] = {}

    def is_too_slow(self, recompute: Recompute) -> bool:
        """Whether it is known that no variant with this, or more, recompute can get into the result."""
        if recompute not in self._bounds:
            self._bounds[recompute] = self._search.bound(self._shape, recompute)
        least_s = self._times.get(recompute, self._bounds[recompute])
        return least_s > self._search.limit(self.degrees)

    def is_surely_too_slow(self, recompute: Recompute) -> bool:
        """The same by predicted steps, which take their time."""
        if recompute not in self._times:
            if self._splits:
                # A schedule is simulated where it could be good enough without any bubble.
                bound = self.least_s(recompute, PLAIN)
                if bound > self._search.limit(self.degrees):
                    self._bounds[recompute] = bound
                    return True
            self._times[recompute] = self.least_s(recompute)
        return self._times[recompute] > self._search.limit(self.degrees)

    def has_room(self, zero: int, shard: int, offload: int) -> bool:
        """False where the state alone of a variant needs more memory than there is."""
        state, _ = self._state(zero, offload)
        sharers = shard * self._dims.cp if zero else 1
        needed = state.of(self._search.parameters / (self._dims.tp * self._dims.pp), sharers)
        if needed > self._available_bytes:
            recompute = self._search.leanest(self._shape)
            self._search.note_tight(needed, self._shape, zero, shard, recompute, self._offloads[offload])
        return needed <= self._available_bytes

    def may_fit(self, zero: int, shard: int, offload: int, recompute: Recompute) -> bool:
        """False where a variant surely needs more memory than there is."""
        state, sharded = self._state(zero, offload)
        sharers = shard * self._dims.cp if zero else 1
        key = recompute, sharded
        if key not in self._parts:
            config = varied(self._variant(zero, offload), parallel=self._with(zero, recompute))
            self._parts[key] = self._search.rooms.parts(config, self._dims)
        needed = max(state.of(one.parameters, sharers) + one.loose_bytes for one in self._parts[key])
        if needed > self._available_bytes:
            self._search.note_tight(needed, self._shape, zero, shard, recompute, self._offloads[offload])
        return needed <= self._available_bytes

    def least_s(self, recompute: Recompute, schedule: str | None = None) -> float:
        """Seconds a token without what variants differ in: the state's part, and what all ranks wait for.

        With `schedule`: as if that were it, and without bubble.
        """
        config = varied(self._search.config, parallel=self._with(0, recompute))
        plan = self._search.predicted(config, self._dims, schedule)
        step = plan.step
        of_state = sum(lane.exposed_s for axis, lane in step.communication.items() if axis in OF_STATE)
        least_s = step.total_s - of_state - step.optimizer_s - step.waiting_s
        if schedule is not None:
            # Which stages share a rank differs between schedules: no rank is busy for less than the average.
            layout = plan.case.layout
            average_s = layout.micro_batches * sum(stage.total_s for stage in step.stages) / layout.pp
            in_stages = sum(lane.exposed_s for axis, lane in step.communication.items() if axis in OF_STAGES)
            least_s += average_s - step.compute_s - in_stages - step.bubble_s
        return least_s / plan.case.tokens * self._search.waiting

    def _state(self, zero: int, offload: int) -> tuple[StateBytes, bool]:
        if (zero, offload) not in self._states:
            config = self._variant(zero, offload)
            state = least_state_bytes(config, self._dims, self._search.micro_batches(self._shape))
            self._states[zero, offload] = state, is_sharded(config, self._dims)
        return self._states[zero, offload]

    def _variant(self, zero: int, offload: int) -> "TrainConfig":
        parallel = self._with(zero, Recompute.none)
        return varied(self._search.config, parallel=parallel, offload=self._offloads[offload])

    def _with(self, zero: int, recompute: Recompute) -> ParallelConfig:
        return dataclasses.replace(
            self._shape, zero=zero, dp_replicate=None, dp_shard=None, recompute=recompute
        )


def _fill(shape: ParallelConfig, recompute: Recompute) -> float:
    schedule = schedule_of(shape)
    if schedule.placement is Placement.v or (schedule.splits_backward and recompute is Recompute.none):
        return FILL_FORWARD
    return FILL


def _laid_out(config: "TrainConfig", machine: Machine) -> ParallelDims | None:
    """The degrees of a layout in numbers, None if it cannot work."""
    # A refusal of `lay_out` looks for what would work instead, which takes its time.
    if not fits(config, config.parallel, machine.gpus):
        return None
    try:
        return lay_out(config, machine.gpus, machine.gpus_per_node, on_gpus=True)
    except ConfigError:
        return None
