"""How the NVMe tier reads and writes: defaults, and what `trierarch nvme-bench` has found to be faster."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from contract.errors import ConfigError, UserError, closest
from train.offload.nvme.files import ALIGN_BYTES

SETTINGS_FILE = "nvme.json"
_LARGEST_BLOCK_BYTES = 1 << 30
_MOST_THREADS = 64


@dataclass(frozen=True)
class NvmeSettings:
    """Sizes and limits of a store's requests to its disks."""

    block_bytes: int = 1 << 20
    """What one request moves; a larger slot is cut into such blocks, which go round the paths."""
    threads: int = 2
    """Threads a path, each with one request at a time: also the depth of a disk's queue."""
    slow_s: float = 10.0
    """A request that takes longer is told about, once."""
    limit_s: float = 120.0
    """A request that takes longer ends the run. Below `resilience.step_timeout_s`, so that the disk is named."""
    measured: dict[str, Any] = field(default_factory=dict)
    """What was measured with these settings; for people."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values that no disk can be used with."""
        for name in ("block_bytes", "threads"):
            if type(getattr(self, name)) is not int:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be a whole number")
        for name in ("slow_s", "limit_s"):
            if type(getattr(self, name)) not in (int, float):
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be a number of seconds")
        if self.block_bytes % ALIGN_BYTES or not ALIGN_BYTES <= self.block_bytes <= _LARGEST_BLOCK_BYTES:
            raise ConfigError(
                f"block_bytes={self.block_bytes}: must be a multiple of {ALIGN_BYTES}, at most {_LARGEST_BLOCK_BYTES}"
            )
        if not 1 <= self.threads <= _MOST_THREADS:
            raise ConfigError(f"threads={self.threads}: must be from 1 to {_MOST_THREADS}")
        if not 0 < self.slow_s <= self.limit_s:
            raise ConfigError(
                f"slow_s={self.slow_s} and limit_s={self.limit_s}: must be above 0, and slow_s not above limit_s"
            )

    @classmethod
    def load(cls, path: Path) -> "NvmeSettings":
        """Read settings from a file, or from `nvme.json` in a folder: the defaults where that has none.

        Raises `ConfigError` for a file that is missing, cannot be read, or holds anything else.
        """
        file = path / SETTINGS_FILE if path.is_dir() else path
        advice = "write it anew with `trierarch nvme-bench`, or remove it"
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if file != path:
                return cls()
            raise ConfigError(
                f"{file} does not exist: write it with `trierarch nvme-bench --write-settings {file}`"
            ) from None
        except OSError as error:
            raise ConfigError(f"{file} cannot be read ({error.strerror}): {advice}") from None
        except ValueError:
            raise ConfigError(f"{file} holds no JSON: {advice}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{file} holds no settings: {advice}")
        known = {one.name for one in fields(cls)}
        for name in values:
            if name not in known:
                raise ConfigError(f"{file}: {name} is no setting, {closest(name, known)}")
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}: {advice}") from None

    def save(self, file: Path) -> None:
        """Write the settings for `load`; raises `UserError` where that is not allowed."""
        temporary = file.with_name(f".{file.name}.new")
        try:
            temporary.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
            temporary.replace(file)
        except OSError as error:
            raise UserError(
                f"{file} cannot be written ({error.strerror}): choose another place with --write-settings FILE"
            ) from None
