"""The `checkpoint` section of the configuration: when to save, how, and what to keep. Imports no torch."""

from dataclasses import dataclass
from enum import StrEnum

from contract.errors import ConfigError
from train.checkpoint.manifest import LONGEST_CHAIN

LARGEST = 1e12
DELTA_CHAIN = 4
LOSSY_ERROR = 0.1
LEAST_LOSSY_ERROR = 2**-8
"""What rounding to the nearest value that has a code makes of bfloat16 in any case."""


class Compress(StrEnum):
    """How published steps are stored."""

    none = "none"
    each = "each"
    """Compressed, each by itself."""
    delta = "delta"
    """Compressed, as the difference to the step before."""


class Lossy(StrEnum):
    """What is rounded before it is saved."""

    none = "none"
    moments = "moments"
    """Moments of the optimizer, to 8 bits each."""
    all = "all"
    """And float32 weights to bfloat16."""


@dataclass
class CheckpointConfig:
    """When to save and how much to keep."""

    every_steps: int = 0
    """0 saves by the clock, on a stop request and at the end only."""
    every_minutes: float = 60.0
    """0 saves by steps, on a stop request and at the end only."""
    keep_last: int = 2
    """Newest checkpoints kept; 0 keeps all. The newest one is never removed, and damaged ones do not count."""
    keep_every_steps: int = 0
    """Also kept: checkpoints of steps that are multiples of it; 0 for none."""
    keep_best: int = 0
    """Also kept: so many checkpoints with the lowest eval_loss, of steps that were evaluated too."""
    disk_budget_gb: float | None = None
    """Room for all checkpoints of the run, GB (1e9 bytes): beyond it the oldest go, the best last. One more is on the
    disk while it is written."""
    background: bool = True
    """Copy the state to memory of the host and write it from there while training goes on; false makes it wait. What
    is offloaded, or kept in fewer bits, is written while training waits in any case: to `fast_path`, where there is
    one, and from there in the background."""
    fast_path: str | None = None
    """A folder on a disk of each node, such as /local/nvme or $LOCAL_SCRATCH (as it is set on the node): a step is
    written there first, and copied to the run folder from there."""
    verify_load: bool = True
    """Compare what is loaded with its hashes: a damaged checkpoint is passed over for an older one."""
    compress: Compress = Compress.none
    """How steps are stored once they are published, bit for bit: `each` by itself or as the `delta` to the one before.
    That of a stop stays plain until the next save."""
    delta_chain: int = DELTA_CHAIN
    """With `compress=delta`: how many steps a step may need, one after the other."""
    lossy: Lossy = Lossy.none
    """Round before saving, for far less room: `moments` to 8 bits each, `all`: weights to bfloat16 too. A run that
    continues from such a step is not exactly the one that was saved."""
    lossy_error: float = LOSSY_ERROR
    """Largest relative error of a moment that `lossy` may make; what would have a larger one stays exact."""
    exact_resume: bool = False
    """Refuse to continue from a step that `lossy` has rounded."""

    def validate(self, evaluates: bool) -> None:
        """Check what must hold; raise `ConfigError` for the first thing that does not.

        `evaluates`: whether the run evaluates at regular steps.
        """
        for name in ("every_steps", "every_minutes", "keep_last", "keep_every_steps", "keep_best"):
            number = getattr(self, name)
            _require(
                0 <= number <= LARGEST,
                f"checkpoint.{name}={number}: must be at least 0 and at most {LARGEST:.0e}",
            )
        fast = self.fast_path
        _require(
            fast is None or fast.startswith(("/", "$", "~")),
            f"checkpoint.fast_path={fast} is not absolute: give the folder of a disk of each node, such as /local/nvme "
            "or $LOCAL_SCRATCH",
        )
        self._validate_retention(evaluates)
        self._validate_compression()

    def _validate_retention(self, evaluates: bool) -> None:
        """Refuse what would keep nothing, or change nothing."""
        budget = self.disk_budget_gb
        _require(
            budget is None or 0 < budget <= LARGEST,
            f"checkpoint.disk_budget_gb={budget}: must be above 0 and at most {LARGEST:.0e}, or null",
        )
        for name in ("keep_every_steps", "keep_best"):
            value = getattr(self, name)
            _require(
                value == 0 or self.keep_last > 0,
                f"checkpoint.{name}={value} changes nothing, for checkpoint.keep_last=0 keeps all: set one of them",
            )
            _require(
                value == 0 or self.every_steps > 0,
                f"checkpoint.{name}={value} needs checkpoints at known steps: set checkpoint.every_steps",
            )
        _require(
            self.keep_every_steps == 0 or self.keep_every_steps % self.every_steps == 0,
            f"checkpoint.keep_every_steps={self.keep_every_steps} is no multiple of checkpoint.every_steps="
            f"{self.every_steps}: change one",
        )
        _require(
            self.keep_best == 0 or evaluates,
            f"checkpoint.keep_best={self.keep_best} needs evaluations: set loop.eval_every_steps and loop.eval_batches",
        )

    def _validate_compression(self) -> None:
        """Refuse what would change nothing, or the opposite of what is asked for."""
        _require(
            1 <= self.delta_chain <= LONGEST_CHAIN // 2,
            f"checkpoint.delta_chain={self.delta_chain}: must be between 1 and {LONGEST_CHAIN // 2}",
        )
        _require(
            self.lossy is Lossy.none or self.compress is not Compress.none,
            f"checkpoint.lossy={self.lossy} only gains where steps are compressed: set checkpoint.compress=each",
        )
        _require(
            self.delta_chain == DELTA_CHAIN or self.compress is Compress.delta,
            f"checkpoint.delta_chain={self.delta_chain} changes nothing without checkpoint.compress=delta: set both",
        )
        _require(
            LEAST_LOSSY_ERROR < self.lossy_error <= 1,
            f"checkpoint.lossy_error={self.lossy_error}: must be above {LEAST_LOSSY_ERROR} and at most 1",
        )
        _require(
            self.lossy_error == LOSSY_ERROR or self.lossy is not Lossy.none,
            f"checkpoint.lossy_error={self.lossy_error} changes nothing without checkpoint.lossy: set both",
        )
        _require(
            self.lossy is Lossy.none or not self.exact_resume,
            f"checkpoint.exact_resume=true refuses what checkpoint.lossy={self.lossy} saves: set one of them",
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
