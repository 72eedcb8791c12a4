"""The two halves of a recipe: `configs/recipe/NAME.yaml` for the training, `configs/job/NAME.yaml` for its job.

`recipe=NAME` chooses both where a job is meant, unless `job=OTHER` chooses another second half.
"""

from collections.abc import Iterable, Sequence

from configs.compose import choices, key_of, parse_setting
from slurm.settings import says_where


def split(overrides: Iterable[str]) -> tuple[list[str], list[str]]:
    """Part a command line into what says where it runs, with its recipe's half of that, and the training itself."""
    where: list[str] = []
    what: list[str] = []
    for override in overrides:
        (where if says_where(key_of(override)) else what).append(override)
    return with_recipe(where, what), what


def with_recipe(where: Sequence[str], what: Iterable[str]) -> list[str]:
    """Return `where` with what the recipe among the training's settings, `what`, says of the job."""
    job = job_of(what)
    if job is None or any(key_of(override) == "job" for override in where):
        return list(where)
    return [f"job={job}", *where]


def job_of(what: Iterable[str]) -> str | None:
    """Return the choice of `job` that comes with the recipe among a training's settings; None if none does."""
    recipes = [str(parse_setting(text).value()) for text in what if key_of(text) == "recipe"]
    return next((recipe for recipe in recipes[-1:] if recipe in choices("job")), None)
