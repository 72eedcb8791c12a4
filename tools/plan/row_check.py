"""Whether a row of published runs has the form that it should: types, and numbers that can be meant."""

import math
from collections.abc import Mapping
from typing import Any

from contract.errors import ConfigError

Row = Mapping[str, Any]

MOST = 10**9
"""Of a whole number."""
MOST_OF = {"layers": 10_000, "zero_stage": 3, "gpu_mem_gb": 10_000, "n_gpus": 10**7, "vpp": 1_000}
LEAST_OF = {"zero_stage": 0}
WHOLE = {
    "model": ("layers", "hidden", "heads", "kv_heads", "vocab", "seq_len"),
    "hardware": ("gpus_per_node", "n_gpus"),
    "layout": (
        *("tp", "pp", "dp", "cp", "vpp", "micro_batch", "global_batch", "grad_accum"),
        *("zero_stage", "zero_shard_group"),
    ),
}
NUMBERS = {"model": ("params", "ffn"), "hardware": ("gpu_mem_gb",), "layout": ()}
TEXTS = {
    "model": ("name",),
    "hardware": ("gpu", "interconnect"),
    "layout": ("schedule", "recompute", "offload"),
}
TRUTHS = {"model": ("gated_mlp", "moe"), "hardware": (), "layout": ("sequence_parallel",)}


def check_row(row: Row) -> None:
    """Raise `ConfigError` for the first thing in `model`, `hardware`, `layout` or `precision` that makes no sense."""
    for section in WHOLE:
        if not isinstance(row.get(section), Mapping):
            raise _wrong(row, section, row.get(section), "must be there, with its keys")
        for key, value in row[section].items():
            if value is not None:
                _check(row, section, key, value)
    text = row.get("precision")
    if text is not None and not isinstance(text, str):
        raise _wrong(row, "precision", text, "must be a text or null")
    _check_together(row)


def contradiction(row: Row, ranks: int) -> str | None:
    """Say where a row's degrees, of `ranks` GPUs, are not those of its hardware."""
    gpus = row["hardware"]["n_gpus"]
    if ranks == gpus:
        return None
    return (
        f"row {row['id']}: its degrees are of {ranks} GPUs, hardware.n_gpus={gpus}: the degrees are believed"
    )


def _check(row: Row, section: str, key: str, value: object) -> None:
    name = f"{section}.{key}"
    if key in TEXTS[section] and not isinstance(value, str):
        raise _wrong(row, name, value, "must be a text or null")
    if key in TRUTHS[section] and not isinstance(value, bool):
        raise _wrong(row, name, value, "must be true, false or null")
    whole = key in WHOLE[section]
    if not whole and key not in NUMBERS[section]:
        return
    least, most = LEAST_OF.get(key, 1), MOST_OF.get(key, MOST if key != "params" else 1e18)
    number = isinstance(value, int) or (not whole and isinstance(value, float) and math.isfinite(value))
    if isinstance(value, bool) or not number or not least <= value <= most:  # type: ignore[operator]
        kind = "a whole number" if whole else "a number"
        raise _wrong(row, name, value, f"must be {kind} from {least} to {most:,.0f}, or null")


def _check_together(row: Row) -> None:
    model, layout = row["model"], row["layout"]
    heads, hidden, kv_heads = model.get("heads"), model.get("hidden"), model.get("kv_heads")
    if heads and hidden and heads > hidden:
        raise _wrong(row, "model.heads", heads, f"are more than model.hidden={hidden}")
    if heads and kv_heads and kv_heads > heads:
        raise _wrong(row, "model.kv_heads", kv_heads, f"are more than model.heads={heads}")
    stages, layers = (layout.get("pp") or 1) * (layout.get("vpp") or 1), model.get("layers")
    # Embedding and head may have stages of their own.
    if layers and stages > layers + 2:
        raise _wrong(row, "layout.pp x vpp", stages, f"are more stages than there are layers ({layers})")


def _wrong(row: Row, name: str, value: object, words: str) -> ConfigError:
    shown = repr(value) if not isinstance(value, str | list | dict) else repr(value)[:40]
    return ConfigError(f"row {row['id']}: {name}={shown}: {words}")
