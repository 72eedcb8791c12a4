"""Fitting the constants to training runs, and how far predictions are from them.

The fit is the most likely one given the priors (`Constants`): a step time is off by `SPREAD` as a rule, those far off
count less (soft L1), and however many rows a source has, it weighs no more than `ROWS_OF_A_SOURCE` would, for its rows
share what is not modelled. So constants on which the rows say nothing stay where measurements of single operations
have them.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.errors import ConfigError
from tools.plan.case import Case
from tools.plan.constants import Constants, constants, priors, write
from tools.plan.row_check import check_row
from tools.plan.rows import Row, case_of, is_complete, read_rows
from tools.plan.step import predict_step

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPREAD = 0.07
"""Of a measured step time around a prediction that knows all that a row says, as a share."""
ROWS_OF_A_SOURCE = 12
MOST_TRIES = 40


@dataclass(frozen=True)
class Measured:
    """A training run: what was run, and how long a step took."""

    id: str
    case: Case
    step_s: float
    source: str
    group: str | None = None
    """Runs of one group differ in their layout alone."""


def measured_of(
    rows: Iterable[Row], tiers: Sequence[str] = ("A",), split: str = "calibrate"
) -> list[Measured]:
    """Return the rows of a split and of tiers that have a step time, are complete and did not run out of memory.

    Raises `ConfigError` for one of them that makes no sense.
    """
    found = []
    for row in rows:
        if row.get("split") != split or row.get("tier") not in tiers:
            continue
        check_row(row)
        step_s = step_time_of(row)
        if step_s is None or not is_complete(row):
            continue
        found.append(Measured(row["id"], case_of(row), step_s, source_of(row), row.get("compare_group")))
    return found


def source_of(row: Row) -> str:
    """Name of the source, without where in it the row stands; raises `ConfigError` where there is none."""
    source = row.get("source")
    if not isinstance(source, Mapping) or "name" not in source:
        raise ConfigError(f"row {row['id']}: source.name is missing: rows of one source are weighed together")
    name = str(source["name"])
    return name.split(" (")[0].strip()


def step_time_of(row: Row) -> float | None:
    """Seconds of a step as it was measured, or as follows from the throughput; raises `ConfigError` for nonsense."""
    measured, derived = row.get("measured") or {}, row.get("derived") or {}
    if not isinstance(measured, Mapping) or not isinstance(derived, Mapping):
        raise ConfigError(f"row {row['id']}: measured and derived must be sections with keys, or null")
    value = measured.get("iteration_time_s") or derived.get("iteration_time_s")
    if not value or measured.get("oom"):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"row {row['id']}: iteration_time_s={value!r}: must be seconds, above 0")
    return float(value)


def fit(runs: Sequence[Measured], around: Constants | None = None) -> Constants:
    """Return the most likely constants; raises `ConfigError` without runs.

    `around`: what was believed before, in place of the priors' values; those without a prior stay as they are there.
    """
    import numpy as np
    from scipy.optimize import least_squares

    if not runs:
        raise ConfigError("there are no runs to calibrate with: rows must be complete and have a step time")
    start = around or Constants()
    known = priors()
    prior = np.array([getattr(start, name) for name in known])
    sigma = np.array([one.sigma for one in known.values()])
    bounds = [one.low for one in known.values()], [one.high for one in known.values()]
    rows_of = Counter(run.source for run in runs)
    weights = np.array([math.sqrt(min(1.0, ROWS_OF_A_SOURCE / rows_of[run.source])) / SPREAD for run in runs])

    def misfit(values: "NDArray[np.float64]") -> "NDArray[np.float64]":
        error = weights * np.log(_ratios(runs, _with(start, values.tolist())))
        # Soft L1 for the rows; the priors stay normal.
        softened = np.sign(error) * np.sqrt(2 * (np.sqrt(1 + error**2) - 1))
        return np.concatenate([softened, (values - prior) / sigma])

    found = least_squares(
        misfit, prior, bounds=bounds, x_scale=sigma, diff_step=1e-3, ftol=1e-3, max_nfev=MOST_TRIES
    )
    return _with(start, found.x.tolist())


def left_out(runs: Sequence[Measured]) -> dict[str, float]:
    """Predicted step time of each run, by constants from all sources but its own (its id -> seconds)."""
    found = {}
    for source in dict.fromkeys(run.source for run in runs):
        known = fit([run for run in runs if run.source != source])
        for run in runs:
            if run.source == source:
                found[run.id] = predict_step(run.case, known).total_s
    return found


def predicted(runs: Sequence[Measured], known: Constants) -> dict[str, float]:
    """Predicted step time of each run (its id -> seconds)."""
    return {run.id: predict_step(run.case, known).total_s for run in runs}


@dataclass(frozen=True)
class Accuracy:
    """How far predictions are from what was measured, as shares."""

    runs: int
    median: float
    """Of the absolute error."""
    bias: float
    """Median of the error."""
    within: Mapping[float, float]
    """Share of the runs that are off by no more: 0.1, 0.15, 0.2."""


def accuracy(runs: Sequence[Measured], times: Mapping[str, float]) -> Accuracy:
    """Compare predictions (id -> seconds) with what was measured."""
    import numpy as np

    errors = np.array([times[run.id] / run.step_s - 1 for run in runs])
    within = {limit: float(np.mean(np.abs(errors) <= limit)) for limit in (0.1, 0.15, 0.2)}
    return Accuracy(len(runs), float(np.median(np.abs(errors))), float(np.median(errors)), within)


@dataclass(frozen=True)
class Choice:
    """How good a choice among the layouts of each group is."""

    groups: int
    regret: float
    """How much longer than the best one the chosen layout's step was, as a share; the mean over groups."""
    random_regret: float
    """The same of a layout picked at random."""
    rank_correlation: float
    """Spearman's, the mean over groups of at least three different predictions; NaN without any."""


def choice(runs: Sequence[Measured], times: Mapping[str, float]) -> Choice:
    """Judge what predictions (id -> seconds) choose in groups of runs that differ in their layout alone."""
    import numpy as np
    from scipy.stats import spearmanr

    groups: dict[str, list[Measured]] = defaultdict(list)
    for run in runs:
        if run.group is not None:
            groups[run.group].append(run)
    regrets, randoms, ranks = [], [], []
    for group in groups.values():
        if len(group) < 2:
            continue
        best = min(run.step_s for run in group)
        # Equal predictions, as of one layout that was measured twice: the mean of what they were measured at.
        least = min(times[run.id] for run in group)
        chosen = [run.step_s for run in group if times[run.id] == least]
        regrets.append(float(np.mean(chosen)) / best - 1)
        randoms.append(float(np.mean([run.step_s for run in group])) / best - 1)
        if len({times[run.id] for run in group}) > 2:
            ranks.append(float(spearmanr([times[run.id] for run in group], [run.step_s for run in group])[0]))
    return Choice(
        len(regrets),
        float(np.mean(regrets)) if regrets else 0.0,
        float(np.mean(randoms)) if randoms else 0.0,
        float(np.mean(ranks)) if ranks else math.nan,
    )


def calibrate(rows: Path, runs: Sequence[Measured], out: Path) -> dict[str, Any]:
    """Fit constants to published rows, or, starting there, to runs of one's own, and write them; returns what of.

    Raises `ConfigError` where there is nothing to fit to, or `out` cannot be written.
    """
    if runs:
        known, origin = fit(runs, around=constants()), "own runs, from the published constants on"
    else:
        runs, origin = measured_of(read_rows(rows)), f"{rows.name}, split calibrate, tier A"
        known = fit(runs)
    found = about(runs, known, origin)
    write(out, known, found)
    return found


def about(runs: Sequence[Measured], known: Constants, origin: str) -> dict[str, Any]:
    """What a file of constants says of itself."""
    found = accuracy(runs, predicted(runs, known))
    return {
        "version": 1,
        "fitted_to": origin,
        "rows": dict(Counter(run.source for run in runs)),
        "median_error": round(found.median, 4),
        "within_15_percent": round(found.within[0.15], 4),
    }


def _with(start: Constants, values: list[float]) -> Constants:
    return replace(start, **dict(zip(priors(), values, strict=True)))


def _ratios(runs: Sequence[Measured], known: Constants) -> list[float]:
    return [predict_step(run.case, known).total_s / run.step_s for run in runs]
