"""What a command line asks to be planned: the training, the machine, which settings of the layout stay."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import configs.compose
from configs.compose import key_of, spell_out
from contract.errors import ConfigError
from slurm.recipe import split
from slurm.settings import compose_submit
from tools.plan.case import Machine, Number
from tools.plan.constants import Constants, constants
from tools.plan.own import machine_of, number_of
from tools.plan.search import Found, search
from tools.plan.settings import PlanConfig, load_plan, says_goal
from tools.plan.space import CHOSEN, DEFAULTS
from train.config import DataConfig, LoopConfig, TrainConfig, finish
from train.data.vocabulary import with_vocabulary
from train.offload.config import OffloadConfig

if TYPE_CHECKING:
    from slurm.settings import SubmitConfig
    from tools.plan.search import Plan
    from train.layout.config import ParallelConfig

AUTO = "parallel=auto"
"""In place of settings of `parallel`: those of the best plan; what else of them is given stays."""
GIB = 2**30


@dataclass(frozen=True)
class Request:
    """What is asked for."""

    config: TrainConfig
    machine: Machine
    fixed: frozenset[str]
    """Settings of `parallel` that stay, and "offload" if that section does."""
    base: "ParallelConfig"
    """The layout without a plan, to which its settings are added."""
    goals: PlanConfig
    settings: "SubmitConfig"
    notes: tuple[str, ...]

    @property
    def known(self) -> Constants:
        """The constants to plan with; raises `ConfigError` for a file that has none."""
        given = self.goals.goals.constants
        return constants() if given is None else constants(Path(given))

    def on(self, nodes: int, samples: int | None = None) -> "Request":
        """The same on another number of nodes, with another global batch."""
        from dataclasses import replace

        from tools.plan.own import varied

        machine = replace(self.machine, gpus=nodes * self.machine.gpus_per_node)
        config = varied(self.config)
        if samples is not None:
            config.loop.global_batch_size = samples
        return replace(self, machine=machine, config=config)


def is_auto(overrides: Sequence[str]) -> bool:
    """Whether a plan is to choose the layout; raises `ConfigError` for another value of the whole section."""
    found = [one for one in overrides if one.partition("=")[0].strip() == "parallel"]
    for one in found:
        if one.partition("=")[2].strip() != "auto":
            raise ConfigError(f"{one}: this is a section, set keys in it, or give parallel=auto")
    return bool(found)


def without_auto(overrides: Sequence[str]) -> list[str]:
    """The others."""
    return [one for one in overrides if one.partition("=")[0].strip() != "parallel"]


def read(overrides: Sequence[str], environ: Mapping[str, str]) -> Request:
    """Compose what is asked for; raises `ConfigError`."""
    auto = is_auto(overrides)
    goals = load_plan([one for one in without_auto(overrides) if says_goal(key_of(one))])
    where, what = split([one for one in without_auto(overrides) if not says_goal(key_of(one))])
    config = configs.compose.compose("train", TrainConfig, what)
    given = {key_of(one) for one in spell_out(what, TrainConfig)}
    fixed = {name for name in CHOSEN if f"parallel.{name}" in given}
    if not auto:
        # What a recipe says of the layout is meant.
        fixed |= {name for name in CHOSEN if getattr(config.parallel, name) != getattr(DEFAULTS, name)}
    free = {name for name in CHOSEN if name not in fixed}
    for name in free:
        setattr(config.parallel, name, getattr(DEFAULTS, name))
    if "micro_batch_size" in free:
        # The default need not divide the global batch, and is not used.
        config.parallel.micro_batch_size = 1
    if any(key.startswith("offload.") for key in given) or config.offload != OffloadConfig():
        fixed.add("offload")
    if not config.data.prefix:
        config.data.prefix = "not-given"
    config = with_vocabulary(finish(config))
    settings = compose_submit(where, environ)
    for name, value in (("nodes", settings.job.nodes), ("ranks_per_node", settings.ranks_per_node)):
        if value < 1:
            raise ConfigError(f"job.{name}={value}: must not be below 1")
    cluster, ranks = settings.cluster, settings.ranks_per_node
    if cluster.gpus_per_node is not None and 0 < cluster.gpus_per_node < ranks:
        raise ConfigError(
            f"job.ranks_per_node={ranks}: {cluster.name} has {cluster.gpus_per_node} GPUs a node, ask for at most "
            f"{cluster.gpus_per_node}"
        )
    machine = machine_of(settings.cluster, settings.job.nodes, settings.ranks_per_node)
    notes = _notes(config, settings, machine)
    return Request(config, machine, frozenset(fixed), config.parallel, goals, settings, notes)


def found_for(request: Request, top: int = 5) -> Found:
    """Search; raises `ConfigError` where no layout works, or none fits."""
    found = search(request.config, request.machine, request.fixed, top, request.known)
    if found.plans:
        return found
    gpus = request.machine.gpus
    stays = ", ".join(
        f"parallel.{name}={getattr(request.config.parallel, name)}"
        for name in CHOSEN
        if name in request.fixed
    )
    if found.tightest is None:
        batch = request.config.loop.global_batch_size
        raise ConfigError(
            f"no layout works on {gpus} GPUs"
            + f" with {stays}" * bool(stays)
            + f": change the number of nodes, or "
            f"loop.global_batch_size={batch}" + ", or leave settings of parallel out" * bool(stays)
        )
    raise ConfigError(
        f"no layout fits {gpus} GPUs of {request.machine.gpu.memory_gb:g} GiB"
        + f" with {stays}" * bool(stays)
        + f": the leanest, {' '.join(_degrees(found.tightest))}, needs "
        f"{math.ceil(found.tightest.room.device_bytes / GIB)} GiB on one; take more nodes, a shorter "
        "data.sequence_length, or offload.optimizer=nvme offload.nvme_path=DISK"
    )


def _degrees(plan: "Plan") -> list[str]:
    dims = plan.dims
    return [
        f"{axis}={getattr(dims, axis)}" for axis in ("tp", "pp", "cp", "dp") if getattr(dims, axis) > 1
    ] or ["dp=1"]


def _notes(config: TrainConfig, settings: "SubmitConfig", machine: Machine) -> tuple[str, ...]:
    found = []
    small = []
    if config.data.sequence_length == DataConfig().sequence_length:
        small.append(f"data.sequence_length={config.data.sequence_length}")
    if config.loop.global_batch_size == LoopConfig().global_batch_size:
        small.append(f"loop.global_batch_size={config.loop.global_batch_size}")
    if small:
        found.append(f"{' and '.join(small)}, the default for a small first run: give yours")
    if not machine.network_known and machine.nodes > 1:
        found.append(
            f"cluster={settings.cluster.name} does not say what its network is: one adapter of "
            f"{machine.gpu.adapter_gbit:g} Gb/s for each GPU is assumed (cluster.nics_per_node, cluster.nic_gbit)"
        )
    name = machine.gpu.name
    if name.startswith("v100") and number_of(config.precision) is Number.bf16:
        found.append(f"{name} has no units for bfloat16: these are the times of float16 (precision=fp16)")
    if number_of(config.precision) is Number.fp8 and machine.gpu.fp8_tflops <= machine.gpu.bf16_tflops:
        found.append(f"{name} has no units for float8: times and MFU are those of bfloat16")
    return tuple(found)
