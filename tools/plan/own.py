"""Our own configuration on a machine of a cluster profile, in the form that the planner predicts."""

import copy
import math
import re
from typing import TYPE_CHECKING

from contract.errors import ConfigError
from slurm.sites.profile import Profile
from tools.plan.case import Attention, Case, Layout, Machine, Model, Number, Recompute
from tools.plan.gpu import Gpu, gpu
from train.layout.batch import micro_batches
from train.layout.config import Recompute as Chosen
from train.layout.dims import ParallelDims
from train.layout.recompute import plan
from train.layout.stages import stage_layers, stages_per_rank
from train.model.config import ModelConfig
from train.offload.config import Tier
from train.precision.config import Compute, PrecisionConfig

if TYPE_CHECKING:
    from train.config import TrainConfig

_GIB_OF_MODEL = re.compile(r"(\d+) ?GB")


def gpu_of(profile: Profile) -> Gpu:
    """Return the class of a profile's GPUs; raises `ConfigError` where that cannot be said."""
    if profile.gpu is not None:
        return gpu(profile.gpu)
    model = (profile.gpu_model or "").upper()
    named = _GIB_OF_MODEL.search(model)
    memory_gb = float(named[1]) if named else profile.gpu_memory_gb
    for family, sizes in (("H200", ()), ("H100", ()), ("V100", ()), ("A100", (40, 64, 80))):
        if family not in model:
            continue
        if not sizes:
            return gpu(family.lower())
        # What a GPU has by its system differs by some percent from what it is sold by.
        near = [size for size in sizes if memory_gb is not None and 0.9 * size <= memory_gb <= 1.1 * size]
        if near:
            return gpu(f"{family.lower()}_{near[0]}")
        raise ConfigError(
            f"cluster={profile.name} does not say which {family} it has: give cluster.gpu="
            f"{', '.join(f'{family.lower()}_{size}' for size in sizes[:-1])} or {family.lower()}_{sizes[-1]}"
        )
    what = f"{profile.gpu_model}, which is not known" if profile.gpu_model else "no GPU"
    raise ConfigError(
        f"cluster={profile.name} names {what}: give cluster.gpu=CLASS, one of configs/gpu or a file like them, and "
        "cluster.gpus_per_node=N"
    )


def machine_of(profile: Profile, nodes: int, ranks_per_node: int) -> Machine:
    """Return `nodes` of a profile with a GPU for each of `ranks_per_node`; raises `ConfigError`.

    A profile that does not know its adapters is taken to have one for each GPU, of the rate usual for its class.
    """
    kind = gpu_of(profile)
    known = profile.nics_per_node is not None and profile.nic_gbit is not None
    nics = ranks_per_node if profile.nics_per_node is None else profile.nics_per_node
    gbit = nics * (kind.adapter_gbit if profile.nic_gbit is None else profile.nic_gbit)
    if not 0 < gbit < math.inf:
        raise ConfigError(
            f"cluster.nics_per_node={profile.nics_per_node} and cluster.nic_gbit={profile.nic_gbit} make no network: "
            "give finite numbers above 0, or leave them out"
        )
    return Machine(kind, nodes * ranks_per_node, ranks_per_node, gbit * 1e9 / 8, known)


def model_of(config: ModelConfig) -> Model:
    """Return the shape of a model; needs `vocab_size`, else `ConfigError`."""
    return Model(
        layers=config.layers,
        hidden=config.dim,
        heads=config.heads,
        kv_heads=config.kv_dim // config.head_dim,
        ffn=config.ffn_dim,
        vocabulary=config.vocabulary,
        tied=config.tie_embeddings,
        name=config.name,
    )


def number_of(precision: PrecisionConfig) -> Number:
    """In what matrix products compute."""
    if precision.compute is Compute.float32:
        return Number.tf32 if precision.tf32 else Number.fp32
    if precision.float8:
        return Number.fp8
    return Number.fp16 if precision.compute is Compute.float16 else Number.bf16


def case_of(config: "TrainConfig", dims: ParallelDims, machine: Machine, model: Model | None = None) -> Case:
    """Return the case of a layout that `lay_out` has passed; `model`: that of the configuration, if it is there."""
    parallel = config.parallel
    layout = Layout(
        tp=dims.tp,
        pp=dims.pp,
        cp=dims.cp,
        dp=dims.dp,
        vpp=stages_per_rank(parallel),
        micro_batch=parallel.micro_batch_size,
        micro_batches=micro_batches(config, dims),
        zero=parallel.zero,
        sharers=dims.dp_shard * dims.cp if parallel.zero > 0 else 1,
        schedule=parallel.schedule if dims.pp > 1 else "1f1b",
        recompute=_again(config, dims),
        sequence_parallel=dims.tp > 1 and parallel.sequence_parallel,
        offload_optimizer=config.offload.optimizer is not Tier.none,
        split=_split(config, dims),
    )
    return Case(
        model=model or model_of(config.model),
        machine=machine,
        layout=layout,
        sequence=config.data.sequence_length,
        number=number_of(config.precision),
        attention=Attention.flash,
        compiled=parallel.compile,
        gradient_bytes=config.precision.reduce.bytes,
    )


def _split(config: "TrainConfig", dims: ParallelDims) -> tuple[int, ...] | None:
    if dims.pp == 1:
        return None
    layers = stage_layers(config.parallel, config.model, config.data.sequence_length)
    return tuple(len(stage) for stage in layers)


def varied(config: "TrainConfig", **changes: object) -> "TrainConfig":
    """Return a shallow copy with other sections, and a `loop` of its own, which `lay_out` fills in."""
    changed = copy.copy(config)
    changed.loop = copy.copy(config.loop)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def _again(config: "TrainConfig", dims: ParallelDims) -> Recompute:
    """What is computed again; a choice for a budget counts as the nearest fixed one by its work."""
    chosen = config.parallel.recompute
    if chosen is not Chosen.auto:
        return {
            Chosen.none: Recompute.none,
            Chosen.selective: Recompute.between,
            Chosen.full: Recompute.full,
        }[chosen]
    kept = plan(config, dims, 0, micro_batches(config, dims), "cuda")
    share = kept.recomputed_flops / max(1, kept.forward_flops)
    if share == 0:
        return Recompute.none
    return min(
        ((0.02, Recompute.between), (0.5, Recompute.half), (1.0, Recompute.full)),
        key=lambda one: abs(one[0] - share),
    )[1]
