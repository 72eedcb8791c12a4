"""What nccl-tests write with `-J FILE`.

Source of the format: NVIDIA, nccl-tests, src/util.cu, JSON_FILE_VERSION 1 and 2.
"""

import json
import math
from pathlib import PurePath
from typing import Any

from contract.errors import UserError
from tools.nccl.parsers.nccl_tests import Benchmark, Device, Row, name_program


def is_output(text: str) -> bool:
    """Whether a text looks like that file."""
    return text.lstrip()[:1] == "{" and '"results"' in text and '"alg_bw"' in text


def parse(text: str, where: str, operation: str | None = None) -> list[Benchmark]:
    """Read the one test of a file; raises UserError where it is none, or cut off."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{where} is no whole JSON file of nccl-tests ({error}): give the text output"
        ) from error
    if not isinstance(tree, dict) or not isinstance(tree.get("results"), list):
        raise UserError(f"{where} has no results of nccl-tests: it is another JSON file")
    average, bounds = _dict(tree.get("average_bus_bandwidth")), _dict(tree.get("out_of_bounds"))
    errors = tree.get("errors")
    test = Benchmark(
        program=_program(tree),
        devices=[
            Device(_int(one.get("rank")), str(one.get("hostname")), _int(one.get("device")), _model(one))
            for one in _dicts(_dict(tree.get("config")).get("devices"))
        ],
        rows=[row for one in _dicts(tree["results"]) for row in _rows(one)],
        average_busbw=_float(average.get("bandwidth"), 1e9),
        out_of_bounds=_int(bounds.get("count")),
        failures=[str(one)[:300] for one in errors if one] if isinstance(errors, list) else [],
    )
    if not test.rows and not test.failures:
        raise UserError(f"{where} has no results of nccl-tests: its list is empty")
    name_program(test, operation)
    return [test]


def _program(tree: dict[str, Any]) -> str | None:
    arguments = tree.get("args")
    if isinstance(arguments, list) and arguments:
        name = PurePath(str(arguments[0])).name.lower().removesuffix("_mpi")
        if name.endswith("_perf"):
            return name.removesuffix("_perf")
    return None


def _rows(one: dict[str, Any]) -> list[Row]:
    found = []
    size_bytes = _int(one.get("size"))
    root = str(one.get("root", "")).strip()
    for key in ("out_of_place", "in_place"):
        values = _dict(one.get(key))
        time = _float(values.get("time", values.get("cpu_time")), 1e-6)
        algbw, busbw = _float(values.get("alg_bw"), 1e9), _float(values.get("bus_bw"), 1e9)
        if not size_bytes or not time or algbw is None or busbw is None:
            continue
        p99 = _float(_dict(one.get(f"{key}_per_iter")).get("p99_us"), 1e-6)
        found.append(
            Row(
                size_bytes=size_bytes,
                redop=str(one["redop"]) if "redop" in one else None,
                root=int(root) if root.removeprefix("-").isdecimal() and len(root) < 10 else None,
                time_s=time,
                p99_s=float("nan") if p99 is None else p99,
                algbw=algbw,
                busbw=busbw,
                wrong=None if values.get("nwrong") is None else _int(values["nwrong"]),
                in_place=key == "in_place",
            )
        )
    return found


def _model(one: dict[str, Any]) -> str:
    return str(one.get("device_info") or "").strip()


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _float(value: Any, scale: float) -> float | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18
    return value * scale if usable and math.isfinite(value) and value >= 0 else None


def _int(value: Any) -> int:
    found = _float(value, 1)
    return 0 if found is None else int(found)
