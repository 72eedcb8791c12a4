"""Everything of DeepSpeed's configuration that has no module of its own here."""

import math
from typing import Any

from tools.deepspeed.file import AUTO, boolean, integer
from tools.deepspeed.rule import Context, Here, Rule, nothing, off, only, sets, setting, whole


def _section(name: str, rules: dict[str, Rule]) -> dict[str, Rule]:
    return {f"{name}.{key}": rule for key, rule in rules.items()}


def _all(keys: str, why: str) -> dict[str, Rule]:
    return {key: nothing(why) for key in keys.split()}


def log_steps(_: Context, value: Any) -> Here:
    """How often a run reports."""
    if value == AUTO:
        return Here(why="auto: loop.log_every_steps as it is set here")
    if isinstance(value, float) and math.isinf(value):
        return Here(
            why="DeepSpeed's own lines, of which there are none; loop.log_every_steps as it is set here"
        )
    return Here((setting("loop.log_every_steps", whole(value)),))


def recomputes(why: str) -> Rule:
    """A switch that says something of layers that are computed again."""

    def rule(_: Context, value: Any) -> Here:
        if value == AUTO or not boolean(value):
            return Here(why="off; parallel.recompute says whether layers are computed again")
        return Here((setting("parallel.recompute", "full"),), why)

    return rule


def cpu_checkpointing(_: Context, value: Any) -> Here:
    """Inputs of layers on the host."""
    if value == AUTO or not boolean(value):
        return Here(why="off")
    return Here((setting("parallel.recompute", "full"), setting("offload.activations", "cpu")))


def interval(_: Context, value: Any) -> Here:
    """Of a pipeline: layers between two whose input is kept."""
    if value == AUTO or not integer(value, 0):
        return Here(why="off; parallel.recompute says whether layers are computed again")
    return Here((setting("parallel.recompute", "full"),), "of each layer the input is kept")


def degree(key: str) -> Rule:
    """A number of ranks; 0 and 1 are none."""

    def rule(_: Context, value: Any) -> Here:
        if value == AUTO:
            return Here(why=f"auto: {key} as it is set here")
        return Here((setting(key, max(1, integer(value, 0))),))

    return rule


def compiled(_: Context, value: Any) -> Here:
    """torch.compile of each layer."""
    if value == AUTO:
        return Here(why="auto: parallel.compile as it is set here")
    return Here((setting("parallel.compile", boolean(value)),))


_METRICS = "metrics.jsonl in the run folder has what is measured"
_TIMES = "metrics.jsonl in the run folder has step time, tokens/s and MFU"
_SENDS = (
    "nothing is sent to {}: set enabled to false; metrics.jsonl and TensorBoard files are in the run folder"
)
_DISKS = "`trierarch nvme-bench` finds out what suits the disks"
_SAVES = "checkpoints here are written in the background, and any continues in any layout"
_AUTOTUNE = "`trierarch layout` shows what a layout costs: set enabled to false"
_MEAN = "gradients are averaged in precision.reduce, which does not overflow"
_AUTOTP = "the model here says itself how its matrices are split"
_EXPERTS = "there are no experts in the models here"

RULES: dict[str, Rule] = {
    "steps_per_print": log_steps,
    "wall_clock_breakdown": nothing(_TIMES),
    "memory_breakdown": nothing("a run shows the memory of each part at its start and its end"),
    "dump_state": nothing("config.yaml in the run folder has the whole configuration"),
    "log_level": nothing("the log has what a run does, at one level"),
    "disable_python_gc": nothing("Python's collector takes no time that is seen here"),
    "vocabulary_size": nothing("model.vocab_size, or the data, says it; DeepSpeed only warns by it"),
    "dataloader_drop_last": nothing("every batch is whole"),
    "zero_allow_untested_optimizer": nothing("the optimizer is AdamW"),
    "zero_force_ds_cpu_optimizer": nothing("the optimizer is AdamW, on the host too"),
    "managed_gradient_accumulation": only(
        True, "the loop here adds up the gradients of a step: set it to true, or drop it", "on, as here"
    ),
    "prescale_gradients": nothing(_MEAN),
    "gradient_predivide_factor": nothing(_MEAN),
    "gradient_allreduce_op": only(
        "mean", "gradients are averaged here: write mean, or drop it", "mean, as here"
    ),
    "sparse_gradients": nothing("gradients of embeddings are dense, with the same sums"),
    "disable_allgather": nothing("weights are gathered by all-gathers, there is nothing else"),
    "use_data_before_expert_parallelism": nothing(_EXPERTS),
    "sequence_parallel_size": degree("parallel.cp"),
    **_section(
        "tensor_parallel",
        {
            "autotp_size": degree("parallel.tp"),
            **_all(
                "dtype tp_overlap_comm injection_policy_tuple partition_config preset_model keep_module_on_host "
                "replace_with_kernel_inject kernel_inject vocab_parallel_lm_head vocab_parallel_ce_backend",
                _AUTOTP,
            ),
            "tp": nothing("DeepSpeed takes autotp_size in its place"),
        },
    ),
    **_section(
        "pipeline",
        {
            "stages": degree("parallel.pp"),
            "activation_checkpoint_interval": interval,
            "partition": nothing("stages are balanced by their time; parallel.split sets them by hand"),
            "seed_layers": nothing("weights depend on the seed alone, not on the layout"),
            **_all(
                "pipe_partitioned grad_partitioned use_reentrant", "neighbours send each other what they need"
            ),
        },
    ),
    **_section(
        "activation_checkpointing",
        {
            "partition_activations": recomputes("with parallel.tp ranks split what is kept, by sequence"),
            "cpu_checkpointing": cpu_checkpointing,
            "contiguous_memory_optimization": nothing("torch's allocator keeps what is kept"),
            "number_checkpoints": nothing(
                "for contiguous_memory_optimization: the input of each layer is kept"
            ),
            "synchronize_checkpoint_boundary": nothing("nothing has to wait there"),
            "profile": nothing(_TIMES),
        },
    ),
    **_section(
        "tensorboard",
        {
            "enabled": sets("monitor.tensorboard", boolean),
            **_all("output_path job_name", "TensorBoard files lie in the run folder, run.root and run.name"),
        },
    ),
    **_section(
        "csv_monitor",
        {"enabled": nothing(_METRICS), **_all("output_path job_name", "see run.root and run.name")},
    ),
    **_section(
        "wandb", {"enabled": off(_SENDS.format("Weights & Biases")), **_all("group team project", "off")}
    ),
    **_section(
        "comet",
        {
            "enabled": off(_SENDS.format("Comet")),
            **_all(
                "samples_log_interval project workspace api_key experiment_name experiment_key online mode",
                "off",
            ),
        },
    ),
    **_section(
        "flops_profiler",
        _all(
            "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
            _TIMES,
        ),
    ),
    **_section(
        "comms_logger",
        _all("enabled prof_all prof_ops verbose debug", "`trierarch layout` shows what each exchange sends"),
    ),
    "timers.throughput.enabled": nothing(_TIMES),
    "timers.throughput.synchronized": nothing("a step that is logged waits for the device"),
    **_section(
        "aio",
        _all(
            "block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events use_gds",
            _DISKS,
        ),
    ),
    **_section(
        "checkpoint",
        {
            "tag_validation": nothing("all ranks save the same step"),
            "use_node_local_storage": nothing(
                "checkpoint.fast_path names a disk of each node, for a first copy"
            ),
            "checkpoint_serialization": nothing(_SAVES),
            **_all("load_universal parallel_write writer", _SAVES),
        },
    ),
    "datastates_ckpt": nothing(_SAVES),
    **_section(
        "compile",
        {
            "enabled": compiled,
            "deepcompile": compiled,
            **{
                name: off(f"compiled layers offload nothing by themselves: set it to false, and see {ours}")
                for name, ours in (
                    ("offload_activation", "offload.activations=cpu"),
                    ("offload_opt_states", "offload.optimizer=cpu"),
                    ("offload_parameters", "offload.parameters=cpu"),
                )
            },
            **_all(
                "backend kwargs free_activation free_activation_threshold offload_activation_pin_memory double_buffer "
                "symmetric_memory debug_log sync_before_reduce sync_after_reduce sync_before_allgather "
                "sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes autoep_non_moe",
                "for torch.compile here there is parallel.compile alone",
            ),
        },
    ),
    "autotuning": off(_AUTOTUNE),
    "data_efficiency": off("samples come in one random order, at one length: set enabled to false"),
    "curriculum_learning": off("samples come in one random order, at one length: set enabled to false"),
    "compression_training": off("weights are trained as they are, not compressed: drop the section"),
    "elasticity": off(
        "`job.nodes` says how many nodes train, and a run continues on others: set enabled to false"
    ),
    "progressive_layer_drop": off("every layer is computed in every step: set enabled to false"),
    "eigenvalue": off("there is no quantization that would use it: set enabled to false"),
    "quantize_training": off("weights are trained as they are, not quantized: drop the section"),
    "sparse_attention": off("attention sees every earlier token: drop the section"),
    "weight_quantization": off("weights are trained as they are, not quantized: drop the section"),
    "expert_parallel": off(f"{_EXPERTS}: set enabled to false"),
    "hybrid_engine": off("a run trains and does not generate meanwhile: set enabled to false"),
    "nebula": off("checkpoints are written by the ranks themselves: set enabled to false"),
    "graph_harvesting": off("there are no CUDA graphs here: set it to false"),
}
