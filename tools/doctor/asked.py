"""What the user asks for, read as far as it can be: each setting that is refused becomes a finding, and is left out."""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import configs.compose
from contract.errors import ConfigError, UserError
from slurm.recipe import with_recipe
from slurm.settings import (
    FOR_PLANS,
    Preflight,
    SubmitConfig,
    compose_submit,
    parse_time_limit,
    refuse_job_without_effect,
    refuse_without_effect,
    says_where,
)
from slurm.sites.limits import check_limits
from slurm.sites.profile import Scheduler
from tools.doctor.finding import Finding, error, note
from train.comm.check import check_comm, check_plan
from train.config import TrainConfig, finish
from train.data.vocabulary import with_vocabulary
from train.layout.batch import check_batch, micro_batches, samples_per_step
from train.layout.check import check_gpu, lay_out
from train.layout.dims import ParallelDims
from train.layout.stages import check_pipeline
from train.offload.check import check_offload
from train.precision.check import check_precision

INNOCENT = ("run", "data", "optim", "resilience", "monitor", "checkpoint", "seed", "offload", "comm")
"""Sections that do not shape a layout: it can be judged although one of their settings is refused."""
AUTO = "parallel=auto"
NOT_GIVEN = "not-given"
"""Stands for a `data.prefix` that the user has to give."""
_KEY = re.compile(r"^'?([a-z_]+(?:\.[a-z_0-9]+)*)")
_SIZE = re.compile(r"\d+ nodes? ")
T = TypeVar("T")


@dataclass
class Asked:
    """Settings, as far as they could be read."""

    config: TrainConfig
    settings: SubmitConfig
    dims: ParallelDims | None = None
    """None: the layout is refused, `why_not` says by what."""
    why_not: str = ""
    refused: list[Finding] = field(default_factory=list)
    """What the commands would refuse, in the order in which it was found."""

    def refuse(self, problem: Exception | str) -> None:
        """Note a refusal, once."""
        said = str(problem)
        # A later look may say the same without what would work instead.
        if any(one.what.startswith(said) for one in self.refused):
            return
        key = _KEY.match(said)
        self.refused.append(error(key[1] if key else "job.nodes" if _SIZE.match(said) else "settings", said))

    def try_out(self, look: Callable[[], T]) -> T | None:
        """Return what `look` does; None, and a refusal noted, where it raises a `UserError`."""
        try:
            return look()
        except UserError as problem:
            self.refuse(problem)
            return None


def read(overrides: Sequence[str], environ: Mapping[str, str]) -> Asked:
    """Read the settings of a submission; what is wrong with them is in `refused`, all of it that can be told."""
    asked = Asked(TrainConfig(), SubmitConfig())
    is_chosen = AUTO in overrides
    where, what = _sorted(asked, [text for text in overrides if text != AUTO])
    with suppress(ConfigError):  # a recipe that there is not is refused below
        where = with_recipe(where, what)
    asked.settings = _settings(asked, where, environ)
    config, dropped = _train(asked, what)
    if config is None:
        asked.why_not = "the settings of the training are refused"
        asked.config = finish(configs.compose.compose("train", TrainConfig, []))
        return asked
    asked.config = with_vocabulary(config)
    if is_chosen:
        asked.why_not = f"{AUTO} chooses the layout, and there is none yet: see `trierarch plan`"
        return asked
    shaping = [text for text in dropped if _shapes(text.partition("=")[0])]
    if shaping:
        asked.why_not = f"{shaping[0]} is refused, and may shape the layout"
    elif min(asked.settings.job.nodes, asked.settings.ranks_per_node) < 1:
        asked.why_not = "the number of ranks is refused"
    else:
        asked.dims = _layout(asked)
        asked.why_not = "" if asked.dims else "the layout is refused"
    return asked


def _shapes(key: str) -> bool:
    """Whether a setting may change how the work is split."""
    section = key.partition(".")[0]
    return key == "loop.global_batch_size" or section not in (*INNOCENT, "loop")


def _sorted(asked: Asked, overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Settings of the submission and of the training, spelled out, without those that are none."""
    where: list[str] = []
    what: list[str] = []
    for text in overrides:
        key = asked.try_out(partial(configs.compose.key_of, text))
        if key is None:
            continue
        kind = where if says_where(key) else what
        schema: type[Any] = SubmitConfig if says_where(key) else TrainConfig
        # One that is refused beside an earlier one is left out alone.
        if asked.try_out(partial(configs.compose.spell_out, [*kind, text], schema)):
            kind.append(text)
    return where, what


def _known(
    asked: Asked, overrides: Sequence[str], schema: type[Any], files: bool
) -> tuple[list[str], list[str]]:
    """Those whose keys and choices there are, and the others."""
    kept: list[str] = []
    dropped: list[str] = []
    for text in configs.compose.spell_out(overrides, schema):
        override = configs.compose.parse_setting(text)
        try:
            configs.compose.check_override(override, schema, files=files)
            kept.append(text)
        except ConfigError as problem:
            asked.refuse(problem)
            dropped.append(text)
    return kept, dropped


def _settings(asked: Asked, where: list[str], environ: Mapping[str, str]) -> SubmitConfig:
    kept, _ = _known(asked, where, SubmitConfig, files=True)
    settings = _composed(asked, kept, [], lambda texts: compose_submit(texts, environ))
    if settings is None:  # Slurm does not answer, or a profile cannot be read
        return SubmitConfig()
    keys = [key for text in kept if (key := configs.compose.key_of(text)) not in FOR_PLANS]
    asked.try_out(lambda: refuse_without_effect(settings, keys))
    asked.try_out(lambda: refuse_job_without_effect(settings, kept))
    asked.try_out(lambda: settings.validate(environ))
    if settings.cluster.scheduler is Scheduler.slurm and settings.nodes > 0:
        asked.try_out(lambda: _check_limits(settings, environ))
    return settings


def _check_limits(settings: SubmitConfig, environ: Mapping[str, str]) -> None:
    """What `validate` does last, and so does not come to where it refuses something else."""
    seconds = parse_time_limit("job.time_limit", settings.time_limit)
    partition, qos = settings.queue("partition", environ), settings.queue("qos", environ)
    check_limits(settings.cluster.limits, partition, qos, settings.nodes, seconds / 3600)


def _train(asked: Asked, what: list[str]) -> tuple[TrainConfig | None, list[str]]:
    """Compose and check; return what is left with the settings that were dropped for it."""
    kept, dropped = _known(asked, what, TrainConfig, files=False)
    while True:
        config = _composed(
            asked, kept, dropped, lambda texts: configs.compose.compose("train", TrainConfig, texts)
        )
        if config is None:
            return None, dropped
        if not config.data.prefix.strip():
            asked.try_out(partial(finish, config))
            config.data.prefix = NOT_GIVEN
        before = len(asked.refused)
        asked.try_out(partial(finish, config))
        if len(asked.refused) == before:
            return config, dropped
        for look in (
            config.parallel.validate,
            config.precision.validate,
            config.offload.validate,
            config.comm.validate,
            partial(
                config.checkpoint.validate, config.loop.eval_every_steps > 0 and config.loop.eval_batches > 0
            ),
            config.model.validate,
        ):
            asked.try_out(look)
        said = " ".join(one.what for one in asked.refused[before:])
        blamed = [text for text in kept if _names(said, text)]
        if not blamed:
            return None, dropped
        kept = [text for text in kept if text not in blamed]
        dropped += blamed


def _composed(
    asked: Asked, texts: list[str], dropped: list[str], compose: Callable[[list[str]], T]
) -> T | None:
    """Compose; a setting that the refusal names is dropped, from `texts` too, until it works or none is named."""
    while True:
        try:
            return compose(texts)
        except UserError as problem:
            asked.refuse(problem)
            blamed = next((text for text in texts if _names(str(problem), text)), None)
            if blamed is None:
                return None
            texts.remove(blamed)
            dropped.append(blamed)


def _names(said: str, text: str) -> bool:
    """Whether a refusal speaks of a setting."""
    key = text.partition("=")[0]
    return re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", said) is not None


def _layout(asked: Asked) -> ParallelDims | None:
    """Lay out, and where that is refused look at its parts one by one: it stops at the first that is wrong."""
    config, settings = asked.config, asked.settings
    ranks, each = settings.job.nodes * settings.ranks_per_node, settings.ranks_per_node
    on_gpus = settings.cluster.gpus_per_node > 0
    dims = asked.try_out(lambda: lay_out(config, ranks, each, on_gpus))
    if dims is not None:
        if settings.job.preflight is Preflight.none:
            asked.try_out(lambda: check_plan(config, dims, each))
        return dims
    asked.try_out(lambda: check_offload(config))
    if on_gpus:
        asked.try_out(lambda: check_gpu(config))
    try:
        refused = ParallelDims.of(config.parallel, ranks)
        samples = samples_per_step(config, refused)
        check_batch(samples, config.parallel.micro_batch_size, refused.dp)
    except ConfigError:  # `lay_out` has said so
        return _with_another_batch(asked, ranks, each, on_gpus)
    trial = copy.deepcopy(config)
    trial.loop.global_batch_size = samples
    for look in (
        lambda: check_pipeline(trial.parallel, trial.model.layers, micro_batches(trial, refused)),
        lambda: check_precision(trial, refused),
        lambda: check_comm(trial, refused, each),
    ):
        asked.try_out(look)
    return None


def _with_another_batch(asked: Asked, ranks: int, each: int, on_gpus: bool) -> ParallelDims | None:
    """Lay out with the next larger batch that divides, so that the rest can be looked at, and say so."""
    trial = copy.deepcopy(asked.config)
    try:
        at_once = trial.parallel.micro_batch_size * ParallelDims.of(trial.parallel, ranks).dp
        if trial.parallel.gradient_accumulation_steps is not None or trial.loop.global_batch_size is None:
            return None
        batch = -(-trial.loop.global_batch_size // at_once) * at_once
        if batch == trial.loop.global_batch_size:
            return None
        trial.loop.global_batch_size = batch
        dims = lay_out(trial, ranks, each, on_gpus)
    except UserError:
        return None
    asked.config = trial
    asked.refused.append(
        note(
            "loop.global_batch_size", f"the rest is judged with loop.global_batch_size={batch}, which divides"
        )
    )
    return dims
