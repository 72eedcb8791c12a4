"""From a command line to a sweep's plan: every combination composed and checked, before anything is queued."""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.compose import flatten_yaml, is_group, parse_setting, to_yaml
from configs.sweep import Composer, Sweep, folder_names, parse_sweep, read_lines, short_keys, sweeps, value_at
from contract.errors import ConfigError
from contract.sweep import SweepFolder
from slurm.recipe import with_recipe
from slurm.settings import SubmitConfig, load_submit, says_where
from slurm.sweeps.tasks import PlannedTask, SweepPlan
from train.config import TrainConfig, finish
from train.data.vocabulary import with_vocabulary
from train.layout.check import lay_out

_ONE_PLACE = (
    "all tasks of a sweep run with the same cluster and job settings, give them one value on the command line (a comma "
    "in it goes in quotes of its own: 'job.partition=\"a,b\"')"
)
_RUN_KEYS = ("run", "run.name", "run.root")


@dataclass(frozen=True)
class Request:
    """What a user typed."""

    overrides: Sequence[str]
    name: str | None = None
    file: Path | None = None
    parallel: int | None = None


def make_plan(request: Request) -> tuple[SweepPlan, SubmitConfig]:
    """Return the plan and where it runs; raises ConfigError, naming the task, for a combination that is wrong."""
    where = [text for text in request.overrides if says_where(_top(text))]
    for text in where:
        if sweeps(text):
            raise ConfigError(f"{text}: {_ONE_PLACE}")
    what = [text for text in request.overrides if not says_where(_top(text))]
    lines = _lines(request.file)
    sweep = _checked(parse_sweep(what, TrainConfig, lines))
    folder = _folder(request, sweep)
    swept_before: list[str] = []
    if folder.is_sweep:
        swept_before = folder.read().keys
        # One value of a key that is swept already adds it to the sweep.
        sweep = _checked(parse_sweep(what, TrainConfig, lines, swept=swept_before))
    if not sweep.keys:
        raise ConfigError(
            "nothing is swept: give a key several values, like optim.lr=1e-4,3e-4, or use `trierarch submit`"
        )
    composer = Composer("train", TrainConfig, sweep.base)
    base = composer.compose()
    with suppress(ConfigError):  # what it lacks its tasks may have: only the paths matter here
        finish(base)
    settings = load_submit(_with_recipes(where, sweep))
    tasks = _tasks(sweep, swept_before, folder, composer, settings)
    given: dict[str, Any] = flatten_yaml(to_yaml(base)) | composer.choices()
    line = shlex.join(
        ["trierarch", "sweep", *(["--name", request.name] if request.name else []), *request.overrides]
    )
    return SweepPlan(folder, sweep.keys, sweep.base, given, tasks, request.parallel, line), settings


def _top(text: str) -> str:
    return text.partition("=")[0].partition(".")[0]


def _with_recipes(where: list[str], sweep: Sweep) -> list[str]:
    """Return `where` with what the tasks' recipe says of the job; raises ConfigError if their recipes differ there."""
    found = {tuple(with_recipe(where, [*sweep.base, *one])) for one in sweep.combinations}
    if len(found) > 1:
        names = " and ".join(sorted(one[0] if len(one) > len(where) else "no job" for one in found))
        raise ConfigError(f"the recipes of the tasks come with {names}: give job=NAME, one for all of them")
    return list(found.pop())


def _lines(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        lines = read_lines(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"--file {file} cannot be read ({reason}): give a text file") from error
    if not lines:
        raise ConfigError(f"--file {file} is empty: write one set of overrides a line")
    for line in lines:
        if any(says_where(_top(word)) for word in line.split()):
            raise ConfigError(f"--file {file}, line {line!r}: {_ONE_PLACE}")
    return lines


def _checked(sweep: Sweep) -> Sweep:
    for key in sweep.keys:
        if key in _RUN_KEYS:
            raise ConfigError(f"{key} cannot be swept: each task's folder is named after its settings")
    return sweep


def _folder(request: Request, sweep: Sweep) -> SweepFolder:
    run = Composer("train", TrainConfig, sweep.base).compose().run
    keys = "-".join(short_keys(sweep.keys).values())
    name = request.name
    if name is None:
        is_named = any(text.startswith(("run.name=", "recipe=")) for text in sweep.base)
        # The default name is the model's, which is not one model here.
        name = keys if {"model", "recipe"} & set(sweep.keys) and not is_named else f"{run.name}-{keys}"
    if not name or "/" in name or name.startswith((".", "-")):
        raise ConfigError(f"--name {name!r}: give a name without / that does not start with a dot or a dash")
    return SweepFolder(Path(run.root).expanduser().absolute() / name)


def _tasks(
    sweep: Sweep,
    swept_before: Sequence[str],
    folder: SweepFolder,
    composer: Composer[TrainConfig],
    settings: SubmitConfig,
) -> list[PlannedTask]:
    keys = list(dict.fromkeys([*swept_before, *sweep.keys]))
    groups = {key for key in keys if is_group(parse_setting(f"{key}=x"))}
    ranks = settings.job.nodes * settings.ranks_per_node
    tasks = []
    for overrides, name in zip(sweep.combinations, folder_names(sweep.combinations, keys), strict=True):
        try:
            config = composer.compose(overrides)
            config.run.name, config.run.root = name, str(folder.path)
            finish(config)
            lay_out(
                with_vocabulary(config),
                ranks,
                settings.ranks_per_node,
                on_gpus=settings.cluster.gpus_per_node > 0,
            )
        except ConfigError as error:
            raise ConfigError(f"task {' '.join(overrides)}: {error}") from error
        choices = composer.choices(overrides)
        values = {key: choices.get(key) if key in groups else value_at(config, key) for key in keys}
        tasks.append(PlannedTask(name, overrides, values, to_yaml(config)))
    return tasks
