"""Classes of GPUs: what their makers say of them. Files in `configs/gpu/`, or the user's own."""

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from contract.errors import ConfigError

USABLE = 0.985
"""Of a GPU's memory, what the driver leaves: 39.4 of 40 GiB, 79.1 of 80 (as torch reports A100s)."""
FOLDER = Path(__file__).resolve().parents[2] / "configs/gpu"
MOST = 1e9
"""Of any of the numbers."""


@dataclass(frozen=True)
class Gpu:
    """One class; rates in one direction, dense."""

    name: str
    memory_gb: float
    """GiB that it is sold with (80 of an A100-80)."""
    bf16_tflops: float
    """Peak of matrix units; fp16 has the same, but for GPUs without bf16."""
    fp32_tflops: float
    fp8_tflops: float
    """As bf16 where there is no fp8."""
    multiprocessors: float
    sustained: float
    """Of the peak, beside an A100: what clocks and power limit leave in long matrix products."""
    attention: float
    """The same for attention in tiles: kernels of flash attention 2 and before use less of newer GPUs."""
    memory_gb_s: float
    link_gb_s: float
    """To the other GPUs of the node, all links together, one direction (300 of an A100's NVLink)."""
    host_gb_s: float
    """To the host's memory, one direction."""
    adapter_gbit: float
    """Of the network adapter that machines of this class usually have for each GPU, Gbit/s."""
    watts: float
    """Thermal design power."""
    idle_watts: float
    source: str = ""

    @property
    def usable_bytes(self) -> float:
        """What a process can have of its memory."""
        return USABLE * self.memory_gb * 2**30


@cache
def gpu(name: str) -> Gpu:
    """Return the class `name` of `configs/gpu`, or of a file; raises `ConfigError`."""
    import yaml

    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    try:
        tree: Any = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        known = ", ".join(sorted(one.stem for one in FOLDER.glob("*.yaml")))
        raise ConfigError(
            f"gpu={name}: there is no such class; choose {known}, or give a file NAME.yaml"
        ) from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"gpu={name}: {path} cannot be read ({str(error).splitlines()[0]})") from None
    return _filled(path, tree)


def _filled(path: Path, tree: Any) -> Gpu:
    names = {field.name: field for field in fields(Gpu)}
    if not isinstance(tree, dict) or set(tree) - set(names) or set(names) - set(tree) - {"source"}:
        wanted = ", ".join(names)
        raise ConfigError(f"{path} does not describe a GPU: it must have {wanted}, and nothing else")
    for name, value in tree.items():
        number = names[name].type in (float, "float")
        if number and (
            isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST
        ):
            raise ConfigError(f"{path}: {name}={value!r} must be a number above 0 and at most {MOST:g}")
        if not number and not isinstance(value, str):
            raise ConfigError(f"{path}: {name}={value!r} must be a text")
    if tree["idle_watts"] > tree["watts"]:
        raise ConfigError(f"{path}: idle_watts={tree['idle_watts']:g} is above watts={tree['watts']:g}")
    return Gpu(**tree)
