"""What a next job reads: nodes to leave out, the order of ranks, the plan for all-reduces, the verdict."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contract.allreduce_plan import FILE as PLAN
from contract.allreduce_plan import AllReducePlan
from contract.network_test import VERDICT
from tools.nccl.report.content import Content
from tools.nccl.report.hostlist import compress

EXCLUDE = "exclude.txt"
HOSTFILE = "hostfile"
RANKFILE = "rankfile"


def write(folder: Path, content: Content) -> list[Path]:
    """Write those files for which there is something to say; what an earlier report left is removed."""
    texts = {
        EXCLUDE: f"{compress(content.exclude)}\n" if content.exclude else "",
        HOSTFILE: hostfile(content),
        RANKFILE: rankfile(content),
        VERDICT: json.dumps(verdict(content), indent=1) + "\n",
    }
    written = []
    for name, text in texts.items():
        if text:
            _replace(folder / name, text)
            written.append(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
    if content.advice.plan:
        AllReducePlan(content.measurement.gpus_per_node, content.advice.plan).save(folder / PLAN)
        written.append(folder / PLAN)
    else:
        (folder / PLAN).unlink(missing_ok=True)
    return written


def order(content: Content) -> list[str]:
    """The nodes for a next job: in the order that suits, without those that are to be left out."""
    nodes = content.advice.order or content.measurement.nodes
    return [name for name in nodes if name not in content.exclude]


def hostfile(content: Content) -> str:
    """One line a rank, for SLURM_HOSTFILE with `srun --distribution=arbitrary`; also `job.node_order` reads it."""
    return "".join(f"{name}\n" * content.measurement.gpus_per_node for name in order(content))


def rankfile(content: Content) -> str:
    """The same for Open MPI: `mpirun --rankfile`."""
    each = content.measurement.gpus_per_node
    return "".join(
        f"rank {node * each + slot}={name} slot={slot}\n"
        for node, name in enumerate(order(content))
        for slot in range(each)
    )


def verdict(content: Content) -> dict[str, Any]:
    """Return the report for a program.

    verdict (OK, DEGRADED, BROKEN), exit_code (0, 1, 2), summary (a sentence), machine; exclude {node: reason}; order
    [node] and order_text, gain_predicted and gain_measured (0.2: a fifth faster; null: not known); faults [{part,
    symptom, name, nodes, rail, gpus, share, confidence, evidence, excludes}]; allreduce [{size_bytes, suits, busbw
    {algorithm: bytes/s}, time_s}]; switches [[from bytes, algorithm]]; settings [{key, value, reason}] of the profile;
    mesh, relays, notes, unmeasured [sentence]; levels [{name, pairs, bandwidth, bandwidth_mad, latency_s,
    latency_mad_s}]; groups [[node]]; remarks [{file, text, verdict, hosts, todo}]; silent {node: reason}. Bandwidths
    are bytes a second, times seconds, null where not known.
    """
    findings, advice = content.findings, content.advice
    tree = {
        "verdict": str(findings.verdict),
        "exit_code": findings.verdict.exit_code,
        "summary": content.summary,
        "machine": content.what,
        "exclude": content.exclude,
        "order": list(advice.order),
        "order_text": advice.order_text,
        "gain_predicted": advice.gain_predicted,
        "gain_measured": advice.gain_measured,
        "faults": [asdict(one) | {"name": one.name} for one in findings.faults],
        "allreduce": [
            {
                "size_bytes": row.size_bytes,
                "suits": row.recommended,
                "busbw": {name: one.busbw for name, one in row.measured.items()},
                "time_s": {name: one.time_s for name, one in row.measured.items()},
            }
            for row in content.all_reduce()
        ],
        "switches": [list(one) for one in advice.switches],
        "mesh": list(advice.mesh),
        "relays": list(advice.relays),
        "levels": [asdict(one) for one in findings.levels],
        "groups": [list(group) for group in findings.groups],
        "notes": [*findings.notes, *advice.notes],
        "unmeasured": list(content.measurement.unmeasured),
        "silent": dict(content.measurement.silent),
        "settings": [asdict(one) for one in content.settings],
        "remarks": [{"file": name} | asdict(one) for name, one in content.remarks],
    }
    plain: dict[str, Any] = _plain(tree)
    return plain


def _plain(value: Any) -> Any:
    """Return what JSON has a word for."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "item"):  # a number of numpy's
        return _plain(value.item())
    return value


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text, encoding="utf-8")
    fresh.rename(path)
