"""Whether a launch may continue what its run has so far, and what is different now."""

import json
from typing import Any

import configs.compose
from contract.errors import ConfigError
from train.checkpoint.manifest import Manifest
from train.config import Resume, TrainConfig
from train.data.loader import describe_change


def check_required(config: TrainConfig) -> None:
    """Check that there is a checkpoint where the configuration wants one."""
    folder = config.run_folder
    if config.run.resume is Resume.required and not folder.published_steps():
        raise ConfigError(f"run {folder.name} has no checkpoint to continue from: drop run.resume=required")


def check_never(config: TrainConfig) -> None:
    """Check that there is no checkpoint where the configuration wants none."""
    folder = config.run_folder
    if config.run.resume is Resume.never and folder.published_steps():
        raise ConfigError(
            f"run {folder.name} already has checkpoints up to step {folder.published_steps()[-1]} in "
            f"{folder.path}: choose another run.name, or drop run.resume=never to continue it"
        )


def check_continues(config: TrainConfig, newest: Manifest, wanted: Manifest) -> None:
    """Check that the checkpoint to continue from belongs to this model and this data."""
    name = config.run.name
    check_model(newest.model, wanted.model, f"the checkpoint of step {newest.step}")
    if change := describe_change(newest.data, wanted.data):
        raise ConfigError(
            f"the data of run {name} is not what it was trained on so far ({change}): give back the old "
            "data.prefix, or start another run.name"
        )
    for key, value in sample_order(config).items():
        if newest.data.get(key) != value:
            raise ConfigError(
                f"{key}={value} differs from {newest.data.get(key)}, with which run {name} was trained so far; "
                "samples would be repeated or skipped: give back the old value, or start another run.name"
            )


def check_exact(config: TrainConfig, restored: Manifest) -> str | None:
    """Check that the values that were restored may have been rounded; say how far they were, None if they were not."""
    if not restored.rounded:
        return None
    errors = ", ".join(f"{role} by up to {error:.2g}" for role, error in restored.rounded.items())
    said = f"the values of step_{restored.step} were rounded when it was saved ({errors}, relative)"
    if config.checkpoint.exact_resume:
        raise ConfigError(
            f"{said}: drop checkpoint.exact_resume=true to continue all the same, or move the step away for an "
            "older one"
        )
    return said


def check_model(saved: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    """Raise `ConfigError` unless weights of the shape `saved`, found at `where`, fit the model `wanted`."""
    harmless = {"name", "init_std", "max_sequence_length"}
    for key in sorted((saved.keys() | wanted.keys()) - harmless):
        old, new = saved.get(key), wanted.get(key)
        if key == "kv_heads":  # null means as many as heads
            old, new = old or saved.get("heads"), new or wanted.get("heads")
        if old != new:
            raise ConfigError(
                f"model.{key} is {new}, but {where} has {old}: use the model and the data that it was trained "
                "with, or give the new run another run.name"
            )


def sample_order(config: TrainConfig) -> dict[str, Any]:
    """What, beside the token files, decides which sample comes when."""
    data = config.data
    return {
        "seed": config.seed,
        "data.sequence_length": data.sequence_length,
        "data.validation_fraction": data.validation_fraction,
    }


def changed_values(before: str, after: str) -> list[str]:
    """Say which values differ between two printed configurations."""
    old, new = configs.compose.flatten_yaml(before), configs.compose.flatten_yaml(after)
    return [
        f"{key}={_written(new.get(key))} (was {_written(old.get(key))})"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def changed_batch(before: int | None, now: int, told: list[str]) -> list[str]:
    """Say that a step has another number of samples, unless `told` does: it may follow from the number of ranks.

    `before` is None where it is not known.
    """
    if before in (None, now) or f"loop.global_batch_size={now} (was {before})" in told:
        return []
    return [f"a step has {now} samples (was {before})"]


def _written(value: Any) -> str:
    """A value as users write it."""
    return value if isinstance(value, str) else json.dumps(value)
