"""`--deepspeed FILE` of the commands that take settings: the file becomes settings, and a table says how."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

DeepSpeedFile = Annotated[
    Path | None,
    typer.Option(
        "--deepspeed",
        metavar="FILE",
        help="A DeepSpeed JSON configuration; its keys become settings, and those given here win.",
    ),
]
WIDTH = 120
"""Columns where there is no terminal."""


def with_deepspeed(path: Path | None, overrides: Sequence[str], ranks: int) -> list[str]:
    """Put the settings of a DeepSpeed configuration before `overrides`, which say what a run of `ranks` trains.

    Prints on stderr what has become of each key; raises `ConfigError` for one that cannot be had here.
    """
    if path is None:
        return list(overrides)
    from configs.compose import compose, parse_setting, spell_out
    from tools.deepspeed.file import read
    from tools.deepspeed.rule import Facts
    from tools.deepspeed.translate import translate
    from tools.table import table
    from train.config import TrainConfig

    spelled = spell_out(overrides, TrainConfig)

    def look(settings: Sequence[str]) -> Facts:
        config = compose("train", TrainConfig, [*settings, *spelled])
        parallel = config.parallel
        axes = parallel.tp * parallel.pp * parallel.cp
        return Facts(
            ranks=None if axes < 1 or ranks % axes else ranks // axes,
            micro_batch_size=parallel.micro_batch_size,
            steps=config.loop.steps,
            lr=config.optim.lr,
            warmup_steps=config.optim.warmup_steps,
            sets_accumulation=parallel.gradient_accumulation_steps is not None,
        )

    given = {}
    for text in spelled:
        override = parse_setting(text)
        given[override.key_or_group] = text.partition("=")[2].strip()
    file = read(path)
    found = translate(file, given, look)
    rows = [(row.key, row.value or "-", row.here) for row in found.rows]
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    print(table((file.name, "value", "here"), rows, frozenset(), width), end="", file=sys.stderr)
    return [*found.settings, *spelled]
