"""ZeRO, and what it keeps on the host and on disks."""

from typing import Any

from tools.deepspeed.file import AUTO, integer
from tools.deepspeed.rule import Context, Here, Rule, choice, nothing, off, only, setting

DEVICES = {"none": "none", "cpu": "cpu", "nvme": "nvme"}
_ZERO = "zero_optimization"
_OLD = {"offload_optimizer": ("cpu_offload",), "offload_param": ("cpu_offload_param", "cpu_offload_params")}


def stage(_: Context, value: Any) -> Here:
    """0 to 3."""
    number = integer(value, 0)
    if number > 3:
        raise ValueError("choose 0, 1, 2 or 3")
    return Here((setting("parallel.zero", number),))


def _stage(context: Context) -> Any:
    return context.file.get(f"{_ZERO}.stage", 0)


def _device(context: Context, section: str) -> str:
    """Where a section, or its old name, puts what it is about."""
    value = context.file.get(f"{_ZERO}.{section}.device")
    if value is not None:
        return choice(DEVICES, value)
    old = any(context.file.get(f"{_ZERO}.{name}", False) for name in _OLD[section])
    return "cpu" if old else "none"


def optimizer(context: Context, value: Any) -> Here:
    """fp32 weights and moments, and gradients on their way to them."""
    if _is_old(context, "offload_optimizer", value):
        return Here(why="off")
    device = _of("offload_optimizer", value)
    if device == "none":
        return Here((setting("offload.optimizer", "none"),))
    if _stage(context) == 0:
        raise ValueError(
            "DeepSpeed offloads the optimizer with stage 1, 2 or 3: set the stage, or device to none"
        )
    found = [setting("offload.optimizer", device)]
    note = ""
    if _stage(context) in (2, 3):
        found.append(setting("offload.gradients", "cpu"))
        note = "gradients go to the host with it, as in DeepSpeed"
    return Here((*found, *_paths(context, "offload_optimizer", device)), note)


def parameters(context: Context, value: Any) -> Here:
    """Weights between their uses."""
    if _is_old(context, "offload_param", value):
        return Here(why="off")
    device = _of("offload_param", value)
    if device != "none" and _stage(context) != 3:
        raise ValueError(
            "DeepSpeed offloads parameters with stage 3 alone: set the stage to 3, or device to none"
        )
    if device != "none" and _device(context, "offload_optimizer") == "none":
        raise ValueError(
            "weights on the host and the optimizer's state on the device free less than they cost: give "
            "offload_optimizer.device=cpu or nvme too"
        )
    return Here((setting("offload.parameters", device), *_paths(context, "offload_param", device)))


def _is_old(context: Context, section: str, value: Any) -> bool:
    """Whether a value is the false of an old key; raises ValueError for its true beside the new section."""
    if value is True and context.file.has(f"{_ZERO}.{section}"):
        raise ValueError(f"this is the old name of {section}, which is given too: drop it")
    return value is False


def _of(section: str, value: Any) -> str:
    """The device, by its name or by the old true and false."""
    if isinstance(value, bool):
        return "cpu" if value else "none"
    if value == AUTO:
        raise ValueError(f"Hugging Face fills in no {section}.device: choose none, cpu or nvme")
    return choice(DEVICES, value)


def _paths(context: Context, section: str, device: str) -> tuple[str, ...]:
    """The folders on disks, of both sections, where this one is the first that needs any."""
    if device != "nvme":
        return ()
    if "offload.nvme_path" in context.given:
        return ()
    found = []
    for one in ("offload_optimizer", "offload_param"):
        path = context.file.get(f"{_ZERO}.{one}.nvme_path")
        if _device(context, one) == "nvme":
            if not isinstance(path, str) or not path.strip():
                raise ValueError(f"nvme needs {one}.nvme_path, the folder of a local disk: add it")
            found.append(path)
    return (setting("offload.nvme_path", list(dict.fromkeys(found))),)


def nvme_path(section: str) -> Rule:
    """Read with the device."""

    def rule(context: Context, _: Any) -> Here:
        if _device(context, section) != "nvme":
            return Here(why="nothing of it goes to disks")
        both = all(_device(context, one) == "nvme" for one in _OLD)
        return Here(why="see device" + "; weights and state share the folders of both sections" * both)

    return rule


def mics(_: Context, value: Any) -> Here:
    """Whole copies of the state in groups of that many ranks."""
    if value in (AUTO, -1):
        return Here(why="off")
    return Here((setting("parallel.dp_shard", integer(value, 1)),), "ranks that share a copy of the state")


def hpz(_: Context, value: Any) -> Here:
    """A second copy of the weights in each node."""
    if value != AUTO and integer(value, 0) > 1:
        raise ValueError(
            "there is no second copy of the weights in each node: drop the key, and to keep gathers inside nodes "
            f"share all of the state among these ranks, parallel.dp_shard={value}"
        )
    return Here(why="off")


_BUCKETS = "a layer is gathered, and its gradients are reduced, as one"
_ALWAYS = "always so here"
_SHARDS = "shards are whole rows of each tensor"
_GATHER = "a layer's weights come just before it, and go after it"
_QUANTIZED = "weights and gradients travel in bf16 or fp32, not in 8 bits: set it to false"
_SAVED = "`trierarch export` writes whole weights of any checkpoint"

RULES: dict[str, Rule] = {
    f"{_ZERO}.{key}": rule
    for key, rule in {
        "stage": stage,
        "offload_optimizer.device": optimizer,
        "offload_optimizer.nvme_path": nvme_path("offload_optimizer"),
        "offload_optimizer.pin_memory": nothing("memory of the host is pinned wherever there is a GPU"),
        "offload_optimizer.buffer_count": nothing("buffers follow from the sizes of the layers"),
        "offload_optimizer.buffer_size": nothing("buffers follow from the sizes of the layers"),
        "offload_optimizer.pipeline": nothing("reads, updates and writes overlap in any case"),
        "offload_optimizer.pipeline_read": nothing("reads, updates and writes overlap in any case"),
        "offload_optimizer.pipeline_write": nothing("reads, updates and writes overlap in any case"),
        "offload_optimizer.fast_init": nothing("state is written as it is made"),
        "offload_optimizer.ratio": only(
            1, "all of the state goes, or nothing: set it to 1", "all of it, as here"
        ),
        "offload_optimizer.super_offload": nothing(
            "updates overlap with the next step's forward in any case"
        ),
        "offload_optimizer.cpuadam_cores_perc": nothing("updates take the cores that a rank has"),
        "offload_param.device": parameters,
        "offload_param.nvme_path": nvme_path("offload_param"),
        "offload_param.pin_memory": nothing("memory of the host is pinned wherever there is a GPU"),
        "offload_param.buffer_count": nothing("offload.prefetch_layers says how many layers come ahead"),
        "offload_param.buffer_size": nothing("buffers follow from the sizes of the layers"),
        "offload_param.max_in_cpu": nothing("what is on disks is read for each use"),
        "cpu_offload": optimizer,
        "cpu_offload_param": parameters,
        "cpu_offload_params": parameters,
        "cpu_offload_use_pin_memory": nothing("memory of the host is pinned wherever there is a GPU"),
        "contiguous_gradients": nothing(_ALWAYS),
        "reduce_scatter": nothing(_ALWAYS),
        "reduce_bucket_size": nothing(_BUCKETS),
        "use_multi_rank_bucket_allreduce": nothing(_BUCKETS),
        "allgather_partitions": nothing(_ALWAYS),
        "allgather_bucket_size": nothing(_BUCKETS),
        "allgather_size": nothing(_BUCKETS),
        "overlap_comm": nothing("communication overlaps with computing in any case"),
        "compute_grad_norm": nothing("the norm is logged in any case"),
        "load_from_fp32_weights": nothing("checkpoints hold fp32 weights"),
        "elastic_checkpoint": nothing("any checkpoint continues in any layout"),
        "sub_group_size": nothing("updates go layer by layer"),
        "prefetch_bucket_size": nothing(_GATHER),
        "stage3_prefetch_bucket_size": nothing(_GATHER),
        "param_persistence_threshold": nothing(_GATHER),
        "stage3_param_persistence_threshold": nothing(_GATHER),
        "model_persistence_threshold": nothing(_GATHER),
        "stage3_model_persistence_threshold": nothing(_GATHER),
        "max_live_parameters": nothing(_GATHER),
        "stage3_max_live_parameters": nothing(_GATHER),
        "max_reuse_distance": nothing(_GATHER),
        "stage3_max_reuse_distance": nothing(_GATHER),
        "gather_16bit_weights_on_model_save": nothing(_SAVED),
        "stage3_gather_16bit_weights_on_model_save": nothing(_SAVED),
        "stage3_gather_fp16_weights_on_model_save": nothing(_SAVED),
        "module_granularity_threshold": nothing(_GATHER),
        "stage3_module_granularity_threshold": nothing(_GATHER),
        "use_all_reduce_for_fetch_params": nothing(_GATHER),
        "stage3_use_all_reduce_for_fetch_params": nothing(_GATHER),
        "allgather_sequential": nothing(_GATHER),
        "stage3_allgather_sequential": nothing(_GATHER),
        "ignore_unused_parameters": nothing("every parameter of a model here is used"),
        "legacy_stage1": nothing("there is one stage 1"),
        "round_robin_gradients": nothing(_SHARDS),
        "parameter_alignment": nothing(_SHARDS),
        "zero_hpz_partition_size": hpz,
        "mics_shard_size": mics,
        "mics_hierarchical_params_gather": nothing("NCCL finds the way of a gather"),
        "zero_quantized_weights": off(_QUANTIZED),
        "zero_quantized_nontrainable_weights": off(_QUANTIZED),
        "zero_quantized_gradients": off(_QUANTIZED),
        "zeropp_loco_param": off(_QUANTIZED.replace("set it to false", "drop the key")),
        "memory_efficient_linear": nothing("the layers here are torch's"),
        "pipeline_loading_checkpoint": nothing("each rank reads what it holds of a checkpoint"),
        "override_module_apply": nothing("weights are made in their shards"),
        "log_trace_cache_warnings": nothing("there is no trace of a model that could change"),
        "enable_sanity_checks": nothing("checks are always made"),
        "save_muon_momentum_buffer_in_memory": nothing("the optimizer is AdamW"),
        "leaf_module.classes": nothing("layers are gathered as one"),
        "leaf_module.names": nothing("layers are gathered as one"),
        "leaf_module.name_suffixes": nothing("layers are gathered as one"),
        "zenflow": off("there is no ZenFlow here: drop the key; offload.delayed_update=true is near to it"),
    }.items()
}
