"""Published training runs as cases: rows in the form of `published_runs.json`.

Of a row only `model`, `hardware`, `layout` and `precision` are read, not what was measured, whose row it is, flags or
notes, so that a prediction can't know the answer. What a row leaves open is taken as stated in the functions below.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from contract.errors import ConfigError
from tools.plan.build import as_built
from tools.plan.case import Attention, Case, Layout, Machine, Model, Number, Recompute
from tools.plan.gpu import Gpu, gpu
from tools.plan.row_check import check_row

Row = Mapping[str, Any]

PUBLISHED = Path(__file__).with_name("published_runs.json")
"""Rows that the constants were fitted to, and more."""
VOCABULARY = 50304
"""Where a row does not say: GPT-2's, padded."""
_GBIT = 1e9 / 8


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; raises `ConfigError`."""
    try:
        tree = json.loads(path.read_text())
        rows = tree["rows"] if isinstance(tree, dict) else tree
        if not isinstance(rows, list) or not all(isinstance(row, dict) and "id" in row for row in rows):
            raise ValueError("it has no list of rows, each with an id")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} cannot be read as published runs: {error}") from None
    return rows


def is_complete(row: Row) -> bool:
    """Whether a row says enough to predict it: a dense model's shape, the number of GPUs, how they share the work."""
    model, layout = row["model"], row["layout"]
    shape = all(model.get(name) for name in ("layers", "hidden", "seq_len"))
    return not model.get("moe") and bool(
        shape and row["hardware"].get("n_gpus") and _degrees(row) and _batches(row) is not None and layout
    )


def case_of(row: Row) -> Case:
    """Bring a row into a case; raises `ConfigError` for one that says too little, or what makes no sense."""
    check_row(row)
    if row["model"].get("moe"):
        raise ConfigError(f"row {row['id']}: model.moe=True: mixtures of experts are not predicted")
    if not is_complete(row):
        raise ConfigError(f"row {row['id']}: the model's shape, the number of GPUs or the batch is missing")
    model, layout, text = row["model"], row["layout"], (row.get("precision") or "").lower()
    tp, pp, cp, dp = _degrees(row) or (1, 1, 1, 1)
    micro_batch, micro_batches = _batches(row) or (1, 1)
    zero = layout.get("zero_stage") or 0
    sharers = min(layout.get("zero_shard_group") or dp * cp, dp * cp) if zero else 1
    number = _number(text)
    attention = _attention(number, bool(model.get("gated_mlp")), layout)
    heads = model.get("heads") or max(1, model["hidden"] // 128)
    case = Case(
        model=Model(
            layers=model["layers"],
            hidden=model["hidden"],
            heads=heads,
            kv_heads=model.get("kv_heads") or heads,
            ffn=_ffn(model),
            vocabulary=model.get("vocab") or VOCABULARY,
            gated=bool(model.get("gated_mlp")),
            # Models of GPT's build share the table between both ends, of Llama's do not.
            tied=not model.get("gated_mlp"),
            biases=not model.get("gated_mlp"),
            name=model.get("name") or "model",
        ),
        machine=_machine(row),
        layout=Layout(
            tp=tp,
            pp=pp,
            cp=cp,
            dp=dp,
            vpp=layout.get("vpp") or (2 if _schedule(layout) in ("zbv", "interleaved_1f1b") else 1),
            micro_batch=micro_batch,
            micro_batches=micro_batches,
            zero=zero,
            sharers=sharers,
            schedule=_schedule(layout),
            recompute=_recompute(layout, attention),
            sequence_parallel=bool(layout.get("sequence_parallel")),
            offload_optimizer="optimizer" in (layout.get("offload") or "")
            or "auto" in (layout.get("offload") or ""),
        ),
        sequence=model["seq_len"],
        number=number,
        attention=attention,
        compiled="compile" in text,
        waits_for_host="deepspeed" in (layout.get("schedule") or "").lower(),
        # FSDP comes with torch's newer checkpoint, Megatron and DeepSpeed with the older one.
        early_stop=zero == 3,
        gradient_bytes=_gradient_bytes(text, number),
    )
    return as_built(case, row)


def _ffn(model: Row) -> int:
    """Width of the MLP; of two thirds of 4 h, where a row has them as they are, trainers make a multiple of 256."""
    width = int(model.get("ffn") or 4 * model["hidden"])
    return -(-width // 256) * 256 if model.get("gated_mlp") and width % 8 else width


def _degrees(row: Row) -> tuple[int, int, int, int] | None:
    layout, gpus = row["layout"], row["hardware"].get("n_gpus")
    tp, pp, cp = (layout.get(name) or 1 for name in ("tp", "pp", "cp"))
    dp = layout.get("dp") or (gpus and gpus // (tp * pp * cp))
    return (tp, pp, cp, dp) if dp else None


def _batches(row: Row) -> tuple[int, int] | None:
    """Sequences of a micro-batch, and micro-batches of a step."""
    layout, degrees = row["layout"], _degrees(row)
    micro, whole, times = (layout.get(name) for name in ("micro_batch", "global_batch", "grad_accum"))
    if degrees is None:
        return None
    dp = degrees[3]
    if micro and whole:
        return micro, max(1, round(whole / (micro * dp)))
    if micro:
        return micro, times or 1
    if whole and times:
        return max(1, whole // (dp * times)), times
    return (1, max(1, whole // dp)) if whole else None


def _machine(row: Row) -> Machine:
    hardware = row["hardware"]
    each = hardware.get("gpus_per_node") or 8
    rate = network_of(hardware.get("interconnect") or "", each)
    kind = _gpu(hardware)
    return Machine(kind, hardware["n_gpus"], each, rate or each * kind.adapter_gbit * _GBIT, rate is not None)


def _gpu(hardware: Row) -> Gpu:
    name, memory = (hardware.get("gpu") or "A100").lower(), hardware.get("gpu_mem_gb")
    found = gpu({"a100": "a100_40" if memory and memory <= 40 else "a100_80"}.get(name, name))
    text = (hardware.get("interconnect") or "").lower()
    if bandwidth := re.search(r"hbm\w* ([1-9]\d*(?:\.\d+)?) ?tb/s", text):
        found = replace(found, memory_gb_s=1e3 * float(bandwidth[1]))
    if watts := re.search(r"(\d+) ?w limit", text):
        found = replace(found, watts=float(watts[1]))
    return replace(found, memory_gb=float(memory)) if memory else found


def network_of(text: str, gpus_per_node: int) -> float | None:
    """Bytes/s of all adapters of a node in one direction, as a description has them; None: it does not say."""
    text = text.lower().replace(",", "")
    if found := re.search(r"(\d+)\s*x\s*(?:\w+ )*?(\d+)\s*g(?:b/s|bps|bit)?\b", text):
        return int(found[1]) * int(found[2]) * _GBIT
    if found := re.search(r"(\d+) [\w-]+ links.*?\((\d+) gb/s", text):
        return int(found[1]) * int(found[2]) * _GBIT
    if found := re.search(r"(\d+)\s*gb/s (?:[\w-]+ )*per gpu", text):
        return gpus_per_node * int(found[1]) * _GBIT
    if found := re.search(r"(\d+)\s*gb/s (?:inter-node|node-node|per node|per vm)", text):
        return int(found[1]) * _GBIT
    return None


def _number(text: str) -> Number:
    if "fp8" in text or "float8" in text:
        return Number.fp8
    if "tf32" in text:
        return Number.tf32
    return Number.fp16 if "fp16" in text and "bf16" not in text else Number.bf16


def _attention(number: Number, gated: bool, layout: Row) -> Attention:
    """No row names its kernel: attention in tiles is assumed but for trainings in fp16 of models of GPT's build.

    Those are from before it, as are such as spare the square by recomputing it.
    """
    spared = (layout.get("recompute") or "") == "selective" and not gated
    return Attention.square if (number is Number.fp16 and not gated) or spared else Attention.flash


def _recompute(layout: Row, attention: Attention) -> Recompute:
    text = (layout.get("recompute") or "none").lower()
    if text.startswith("full"):
        return Recompute.full
    if "subset" in text or "every" in text:
        return Recompute.half
    if text.startswith("selective"):
        return Recompute.attention if attention is Attention.square else Recompute.between
    return Recompute.none


def _schedule(layout: Row) -> str:
    text = (layout.get("schedule") or "").lower()
    if text.startswith("zb-"):
        return {"zb-v": "zbv"}.get(text, text.replace("-", "_"))
    if "interleaved" in text or (layout.get("vpp") or 1) > 1:
        return "interleaved_1f1b"
    return "gpipe" if "gpipe" in text else "1f1b"


def _gradient_bytes(text: str, number: Number) -> int:
    """Megatron's, torchtitan's and FSDP's usual build reduces in fp32; where a row says otherwise it is believed."""
    if "fp16 grad" in text or "pure" in text:
        return 2
    return 4 if "fp32 grad" in text or number in (Number.fp32, Number.tf32) or "default" in text else 2
