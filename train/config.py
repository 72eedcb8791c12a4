"""The training configuration: every key, its default, and what must hold between keys.

The dataclasses carry the defaults; `configs/` carries named choices that fill them. Imports no torch, so
that a login node can check a configuration in no time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

import configs.compose
from contract.errors import ConfigError
from contract.run_folder import RunFolder
from train.checkpoint.config import CheckpointConfig
from train.comm.config import CommConfig
from train.layout.config import ParallelConfig
from train.layout.synonyms import IMPLIED, SYNONYMS
from train.model.config import ModelConfig
from train.offload.config import OffloadConfig, Tier
from train.precision.config import Compute, PrecisionConfig

LARGEST = 1e12
"""Bound of every number: beyond it, and for nan and inf, arithmetic further on would fail without a word."""


WATCH_MARGIN_S = 30.0
"""How much earlier one of two nested time limits must end, so that the one that knows the reason fires first."""


class Resume(StrEnum):
    """What to do about checkpoints that the run folder already holds."""

    auto = "auto"
    """Continue from the newest whole one, start at step 0 when there is none."""
    required = "required"
    """Continue; having none is an error."""
    never = "never"
    """Start at step 0; having any is an error, nothing is ever overwritten."""


class Decay(StrEnum):
    """Shape of the learning rate after warm-up."""

    cosine = "cosine"
    linear = "linear"
    wsd = "wsd"
    """Warm-up, stable, decay: constant until `decay_fraction` of the run is left, then linear."""
    constant = "constant"


class Warmup(StrEnum):
    """Shape of the learning rate in warm-up."""

    linear = "linear"
    log = "log"
    """As the logarithm of the step: most of the rise comes early."""


class Progress(StrEnum):
    """How the run reports itself on the terminal."""

    auto = "auto"
    """A live line on the user's terminal, a line every `log_every_steps` elsewhere."""
    off = "off"


@dataclass
class RunConfig:
    """Where the run lives. The folder is `root/name`: the same name continues the same run."""

    name: str = "${model.name}"
    root: str = "runs"
    resume: Resume = Resume.auto
    init_from: str | None = None
    """Folder of a Hugging Face Llama to start from, instead of random weights; a checkpoint of the run goes first."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ConfigError(f"run.name={self.name!r}: give a name without / that does not start with a dot")


@dataclass
class DataConfig:
    """Which tokens, and how they are cut into samples."""

    prefix: str = "data/python-stdlib"
    """Token files `<prefix>.bin`, `.idx` and `.json`, as `trierarch data prepare` writes them."""
    sequence_length: int = 256
    """Tokens a sample."""
    validation_fraction: float = 0.05
    """Share of the tokens, from the end of the file, held out for evaluation; cut at a document boundary."""
    mask_documents: bool = False
    """Keep attention from crossing from one document into the next within a sample."""
    prefetch_batches: int = 2
    """Batches read ahead by a background thread; 0 reads in the loop."""


@dataclass
class LoopConfig:
    """The training loop."""

    steps: int = 1000
    global_batch_size: int | None = 16
    """Samples an optimizer step, over all ranks and micro-batches; null follows from
    parallel.gradient_accumulation_steps."""
    clip_norm: float = 1.0
    """Largest gradient norm; 0 does not clip."""
    log_every_steps: int = 10
    eval_every_steps: int = 200
    """0 evaluates only at the end."""
    eval_batches: int = 20
    """Global batches of held-out samples an evaluation; 0 does not evaluate."""

    @property
    def samples_per_step(self) -> int:
        """`global_batch_size`, once the layout is known."""
        assert self.global_batch_size is not None, "lay_out fills it"
        return self.global_batch_size


@dataclass
class OptimConfig:
    """AdamW and its learning rate."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Applied to matrices only, not to norms."""
    warmup_steps: int = 100
    warmup: Warmup = Warmup.linear
    warmup_min_ratio: float = 0.0
    """Learning rate at which warm-up begins as a share of `lr`."""
    decay: Decay = Decay.cosine
    decay_fraction: float = 0.2
    """Share of the steps that the decay of `wsd` takes."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a share of `lr`."""
    deepspeed_steps: bool = False
    """Count steps as DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR do, for the same rates step by step: two
    steps later in warm-up than here. Not with `wsd`."""


@dataclass
class ResilienceConfig:
    """Stop requests and time limits."""

    stop_signal: str = "SIGUSR2"
    """Asks for a checkpoint and an orderly end, beside SIGTERM and Ctrl-C. Not SIGUSR1: NCCL takes it."""
    start_timeout_s: float = 300.0
    """How long the ranks wait for each other at the start, and how long the first step may take."""
    step_timeout_s: float = 300.0
    """How long a later step may take before the rank counts as hung: its stack is written and the run restarted."""
    collective_timeout_s: float = 600.0
    """How long a collective waits for a rank that does not come; the limits above fire first and say which it is."""
    checkpoint_timeout_s: float = 1800.0
    """How long a save or a load waits for the slowest rank's storage."""


@dataclass
class MonitorConfig:
    """What a run tells of itself."""

    progress: Progress = Progress.auto
    tensorboard: bool = True
    peak_tflops: float | None = None
    """Peak of one device for MFU; known GPUs are looked up, null elsewhere leaves MFU out."""


@dataclass
class TrainConfig:
    """All of a training run."""

    SYNONYMS: ClassVar[dict[str, str]] = SYNONYMS
    IMPLIED: ClassVar[dict[str, str]] = IMPLIED

    seed: int = 1234
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)

    @property
    def run_folder(self) -> RunFolder:
        """The folder of this run."""
        return RunFolder(Path(self.run.root) / self.run.name)

    @property
    def held(self) -> Compute:
        """The type in which weights lie on their device between steps."""
        if self.precision.parameters is not None:
            return self.precision.parameters
        return Compute.float32 if self.offload.optimizer is Tier.none else self.precision.compute

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer keeps fp32 weights of its own, beside those that compute."""
        return self.offload.optimizer is not Tier.none or self.held is not Compute.float32

    def validate(self) -> None:
        """Check what must hold; raise `ConfigError` for the first thing that does not."""
        for path, value in (
            ("data.sequence_length", self.data.sequence_length),
            ("loop.steps", self.loop.steps),
            (
                "loop.global_batch_size",
                1 if self.loop.global_batch_size is None else self.loop.global_batch_size,
            ),
            ("loop.log_every_steps", self.loop.log_every_steps),
            ("resilience.start_timeout_s", self.resilience.start_timeout_s),
            ("resilience.step_timeout_s", self.resilience.step_timeout_s),
            ("resilience.collective_timeout_s", self.resilience.collective_timeout_s),
            ("resilience.checkpoint_timeout_s", self.resilience.checkpoint_timeout_s),
        ):
            _require(0 < value <= LARGEST, f"{path}={value}: must be above 0 and at most {LARGEST:.0e}")
        for path, number in (
            ("loop.clip_norm", self.loop.clip_norm),
            ("loop.eval_every_steps", self.loop.eval_every_steps),
            ("loop.eval_batches", self.loop.eval_batches),
            ("data.prefetch_batches", self.data.prefetch_batches),
            ("seed", self.seed),
            ("optim.lr", self.optim.lr),
            ("optim.eps", self.optim.eps),
            ("optim.warmup_steps", self.optim.warmup_steps),
            ("optim.weight_decay", self.optim.weight_decay),
        ):
            _require(0 <= number <= LARGEST, f"{path}={number}: must be at least 0 and at most {LARGEST:.0e}")
        for path, share in (
            ("data.validation_fraction", self.data.validation_fraction),
            ("optim.beta1", self.optim.beta1),
            ("optim.beta2", self.optim.beta2),
        ):
            _require(0 <= share < 1, f"{path}={share}: must be at least 0 and below 1")
        for path, share in (
            ("optim.min_lr_ratio", self.optim.min_lr_ratio),
            ("optim.warmup_min_ratio", self.optim.warmup_min_ratio),
            ("optim.decay_fraction", self.optim.decay_fraction),
        ):
            _require(0 <= share <= 1, f"{path}={share}: must be between 0 and 1")
        peak = self.monitor.peak_tflops
        _require(peak is None or 0 < peak <= LARGEST, f"monitor.peak_tflops={peak}: must be above 0, or null")
        _require(self.optim.eps > 0, "optim.eps=0: must be above 0, else an update divides by zero")
        for path, value in (
            ("resilience.start_timeout_s", self.resilience.start_timeout_s),
            ("resilience.checkpoint_timeout_s", self.resilience.checkpoint_timeout_s),
            ("data.prefetch_batches", self.data.prefetch_batches),
        ):
            _require(value <= 1e6, f"{path}={value}: must be at most 1e6")
        _require(bool(self.run.root.strip()), "run.root is empty: give a folder")
        _require(
            bool(self.data.prefix.strip()),
            "data.prefix is not given: name your token files, data.prefix=PATH, as `trierarch data prepare` wrote them",
        )
        self.parallel.validate()
        self.precision.validate()
        self.offload.validate()
        self.comm.validate()
        micro, total = self.parallel.micro_batch_size, self.loop.global_batch_size
        _require(
            total is not None or self.parallel.gradient_accumulation_steps is not None,
            "loop.global_batch_size=null: give it, or parallel.gradient_accumulation_steps",
        )
        _require(
            total is None or total % micro == 0,
            f"loop.global_batch_size={total} is no multiple of parallel.micro_batch_size={micro}: change one",
        )
        _require(
            self.loop.eval_batches == 0 or self.data.validation_fraction > 0,
            "data.validation_fraction=0 holds nothing out: set loop.eval_batches=0 too, or hold some out",
        )
        name = self.resilience.stop_signal
        # Launchers pass these on; they answer SIGTERM and SIGINT by killing the ranks.
        _require(
            name in ("SIGUSR1", "SIGUSR2"),
            f"resilience.stop_signal={name}: choose SIGUSR2, or SIGUSR1 without NCCL",
        )
        _require(
            self.resilience.checkpoint_timeout_s >= self.resilience.collective_timeout_s,
            f"resilience.checkpoint_timeout_s={self.resilience.checkpoint_timeout_s} is below "
            f"resilience.collective_timeout_s={self.resilience.collective_timeout_s}: give saves more time",
        )
        for path, value in (
            ("resilience.step_timeout_s", self.resilience.step_timeout_s),
            ("resilience.start_timeout_s", self.resilience.start_timeout_s),
        ):
            _require(
                value + WATCH_MARGIN_S <= self.resilience.collective_timeout_s,
                f"{path}={value} leaves less than {WATCH_MARGIN_S:.0f} s until "
                f"resilience.collective_timeout_s={self.resilience.collective_timeout_s}, at which the ranks that wait "
                "for a hung one give up: lower it, or raise resilience.collective_timeout_s",
            )
        if self.optim.decay is Decay.wsd:
            _require(
                not self.optim.deepspeed_steps,
                "optim.deepspeed_steps=true: DeepSpeed has no optim.decay=wsd, choose linear, cosine or constant",
            )
            decay_steps = round(self.loop.steps * self.optim.decay_fraction)
            _require(
                self.optim.warmup_steps + decay_steps <= self.loop.steps,
                f"optim.warmup_steps={self.optim.warmup_steps} reaches into the decay, the last {decay_steps} of "
                f"loop.steps={self.loop.steps}: shorten one of them",
            )
        self.checkpoint.validate(evaluates=self.loop.eval_every_steps > 0 and self.loop.eval_batches > 0)
        self.model.validate()
        self.model.check_sequence_length(self.data.sequence_length)


def load_config(overrides: Sequence[str], reads_data: bool = True) -> TrainConfig:
    """Compose and check the training configuration under the user's overrides.

    Without `reads_data` a recipe that leaves `data.prefix` to the user is no error.
    """
    config = configs.compose.compose("train", TrainConfig, overrides)
    if not reads_data and not config.data.prefix:
        config.data.prefix = "not-given"
    return finish(config)


def read_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read the `config.yaml` of a run folder and check it."""
    return finish(configs.compose.load(path, TrainConfig, overrides))


def finish(config: TrainConfig) -> TrainConfig:
    """Make the paths of a composed configuration absolute, in place, and check it; returns it."""
    # A job runs in its code snapshot: a path must mean the same there as where the user typed it.
    config.run.root = str(Path(config.run.root).expanduser().absolute())
    if config.run.init_from is not None:
        config.run.init_from = str(Path(config.run.init_from).expanduser().absolute())
    if config.data.prefix.strip():
        config.data.prefix = str(Path(config.data.prefix).expanduser().absolute())
    config.offload.nvme_path = [str(Path(path).expanduser().absolute()) for path in config.offload.nvme_path]
    if config.comm.plan is not None:
        config.comm.plan = str(Path(config.comm.plan).expanduser().absolute())
    if config.offload.nvme_settings is not None:
        config.offload.nvme_settings = str(Path(config.offload.nvme_settings).expanduser().absolute())
    config.validate()
    return config


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
