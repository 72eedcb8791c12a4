"""Predictions for rows in the form of `published_runs.json`: `trierarch plan predict`."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from contract.errors import ConfigError
from tools.plan.constants import Constants, constants
from tools.plan.memory import predict_memory
from tools.plan.row_check import contradiction
from tools.plan.rows import Row, case_of
from tools.plan.step import predict_step
from tools.plan.whole import write_whole

GIB = 2**30


def predict_rows(rows: Iterable[Row], known: Constants | None = None) -> list[dict[str, Any]]:
    """Return for each row its `id` with the predicted figures; nulls and a `problem` where a row says too little.

    A `problem` beside figures: the row contradicts itself, and what was believed.
    `iteration_time_s`: of a step; `model_tflops_per_gpu`: forward and backward alone, the whole square of attention
    counted; `mem_gb`: GiB that the framework's allocator has at its peak (nvidia-smi shows CUDA's besides); `oom`:
    whether what is needed is more than the GPU has.
    """
    known = known or constants()
    return [_predict(row, known) for row in rows]


def write(path: Path, found: list[dict[str, Any]]) -> None:
    """Write predictions, one on a line; raises `ConfigError` where that fails."""
    lines = ",\n".join(json.dumps(one) for one in found)
    write_whole(path, f"[\n{lines}\n]\n")


def _predict(row: Row, known: Constants) -> dict[str, Any]:
    try:
        case = case_of(row)
    except ConfigError as error:
        empty = dict.fromkeys(("iteration_time_s", "model_tflops_per_gpu", "mem_gb", "oom"))
        return {"id": row["id"], **empty, "problem": str(error)}
    step_s = predict_step(case, known).total_s
    memory = predict_memory(case, known)
    problem = contradiction(row, case.layout.ranks)
    return {
        "id": row["id"],
        "iteration_time_s": step_s,
        "model_tflops_per_gpu": case.model_flops / step_s / 1e12,
        "mem_gb": memory.allocated / GIB,
        # The allocator gives up what it only holds before it fails.
        "oom": memory.needed > case.machine.gpu.usable_bytes,
        **({} if problem is None else {"problem": problem}),
    }
