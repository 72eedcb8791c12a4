"""The network adapters of this node, as the kernel lists them: what a measurement notes of itself."""

import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path("/sys/class/infiniband")
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec")


def here(folder: Path = FOLDER, environ: Mapping[str, str] | None = None) -> dict[str, int | float]:
    """Return `nics_per_node` and `nic_gbit` of the ports that are up, as NCCL may use them.

    Where NCCL_IB_HCA names ports by "=", only these. Ports that are slower than most, such as those for storage, are
    not counted. Empty without any.
    """
    wanted = (os.environ if environ is None else environ).get("NCCL_IB_HCA", "")
    names = wanted[1:].split(",") if wanted.startswith("=") else []
    rates = []
    for port in sorted(folder.glob("*/ports/*")):
        name = port.parent.parent.name
        if names and not {name, f"{name}:{port.name}"} & set(names):
            continue
        rate = _RATE.match(_read(port / "rate"))
        if "ACTIVE" in _read(port / "state") and rate:
            rates.append(float(rate[1]))
    if not rates:
        return {}
    gbit, count = max(Counter(rates).items(), key=lambda item: (item[1], item[0]))
    return {"nics_per_node": count, "nic_gbit": gbit}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
