"""Settings that only a plan has: what is to be reached, and what the machine costs and how often it fails."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from configs.compose import fill, key_of
from contract.errors import ConfigError

LLAMA3_FAILURES = 419 / (54 * 16384)
"""A GPU and day: 419 unexpected interruptions in 54 days on 16,384 H100 (Llama Team 2024)."""


@dataclass
class TargetConfig:
    """How long to train."""

    tokens: float | None = None
    """Tokens to train on; null: loop.steps steps."""


@dataclass
class GoalsConfig:
    """What a plan assumes of a machine."""

    failures_per_gpu_day: float = LLAMA3_FAILURES
    """Interruptions for each GPU and day; the default is that of Llama 3's training."""
    restart_s: float = 300.0
    """From a failure until training goes on, beside the work that is lost: an estimate, with a node to be replaced."""
    write_gb_s_per_node: float = 1.0
    """To the file system, GB/s (1e9 bytes), all nodes writing at once: an estimate."""
    write_gb_s: float = 100.0
    """The most that the file system takes from all nodes: an estimate."""
    host_watts_per_gpu: float = 200.0
    """Of processors, memory, adapters and fans for each GPU: an estimate; a DGX A100 draws at most 6.5 kW, of which 8
    GPUs take 3.2."""
    pue: float = 1.2
    """Power of the site for each watt of the machine: that of Jean Zay (Luccioni et al. 2022)."""

    constants: str | None = None
    """File of constants by `trierarch plan calibrate`; null: the planner's own."""

    def validate(self) -> None:
        """Raise `ConfigError` for values that make no sense."""
        for name, least in (
            ("failures_per_gpu_day", 0.0),
            ("restart_s", 0.0),
            ("host_watts_per_gpu", 0.0),
            ("pue", 1.0),
        ):
            _require(name, getattr(self, name), getattr(self, name) >= least, f"at least {least:g}")
        for name in ("write_gb_s_per_node", "write_gb_s"):
            _require(name, getattr(self, name), getattr(self, name) > 0, "above 0")


@dataclass
class PlanConfig:
    """All of them."""

    train: TargetConfig = field(default_factory=TargetConfig)
    goals: GoalsConfig = field(default_factory=GoalsConfig)

    def validate(self) -> None:
        """Raise `ConfigError` for values that make no sense."""
        tokens = self.train.tokens
        if tokens is not None and not 0 < tokens <= 1e18:
            raise ConfigError(f"train.tokens={tokens:g}: must be above 0 and at most 1e18")
        self.goals.validate()


def says_goal(key: str) -> bool:
    """Whether a key of the user's is one of these settings."""
    return key.partition(".")[0] in ("train", "goals")


def load_plan(overrides: Iterable[str]) -> PlanConfig:
    """Compose and check these settings."""
    config = fill(PlanConfig, [one for one in overrides if says_goal(key_of(one))])
    config.validate()
    return config


def _require(name: str, value: float, holds: bool, words: str) -> None:
    if not holds or value > 1e9:
        raise ConfigError(f"goals.{name}={value:g}: must be {words} and at most 1e9")
