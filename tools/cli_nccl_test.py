"""`trierarch nccl test` and `report`: measure the network in a job, and show what it has found."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from contract.errors import ConfigError, UserError
from contract.network_test import BROKEN, BROKEN_CODE, REPORT, VERDICT, NetworkVerdict, last_words, logs_of

if TYPE_CHECKING:
    from contract.run_folder import RunFolder
    from slurm.settings import SubmitConfig

app = typer.Typer()

LOOK_EVERY_S = 2.0
DEFAULT_S = 300
"""How long a test measures where nobody says."""
AROUND_S = 900
"""What the job may take beside that: to start agents, to check nodes, to begin anew without a silent one."""


@app.command()
def test(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Where: nodes=16 cluster=NAME job.partition=debug; job.preflight_s=120 is how long to measure.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Of the folder below runs. Default: cluster and time.")
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(help="measurement.npz of an earlier test of this machine: what is slower than then?"),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the end, print the report, end with its code: 0, 1 or 2.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "--render", help="Print the batch script, submit nothing.")
    ] = False,
) -> None:
    """Submit a job that measures the network between its nodes: what is bad, which order and which settings suit."""
    from contract.run_folder import RunFolder
    from slurm.submit import submit

    settings = test_settings(overrides or [], baseline)
    title = name or f"nccl-{settings.cluster.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if "/" in title or title.startswith("."):
        raise ConfigError(f"--name {title}: give a name without / that does not start with a dot")
    run = RunFolder(Path("runs") / title)
    submission = submit(run, None, settings, dry_run=dry_run)
    if dry_run:
        print(submission.script, end="")
        return
    print(f"{submission.summary()}\nthen:  trierarch nccl report {title}", flush=True)
    if wait:
        _wait(submission.run)
        raise typer.Exit(show(submission.run))


@app.command()
def report(
    run: Annotated[
        str, typer.Argument(help="A run of `trierarch nccl test`, or one with job.preflight=nccl.")
    ],
) -> None:
    """Print what a run's network test has found; end with its code: 0 (OK), 1 (DEGRADED) or 2 (BROKEN)."""
    from slurm.runs.find import resolve_run

    raise typer.Exit(show(resolve_run(run)))


def test_settings(overrides: list[str], baseline: Path | None) -> "SubmitConfig":
    """Return the settings of a job that only tests: short, and not requeued. Raises ConfigError."""
    from configs.compose import key_of, spell_out
    from slurm.settings import SubmitConfig, load_submit, says_where

    for override in overrides:
        if not says_where(key_of(override)):
            raise ConfigError(f"{override}: a network test trains nothing, give settings of cluster and job")
    overrides = spell_out(overrides, SubmitConfig)
    given = {key_of(override) for override in overrides}
    chosen = [*overrides]
    for key, value in (("job.preflight", "nccl"), ("job.preflight_s", str(DEFAULT_S))):
        chosen += [f"{key}={value}"] if key not in given else []
    if baseline is not None:
        chosen.append(f"job.preflight_baseline={baseline.absolute()}")
    settings = load_submit(chosen)
    if settings.nodes * settings.ranks_per_node == 1 and "job.ranks_per_node" not in given:
        # One rank has nobody to talk to.
        settings = load_submit([*chosen, "job.ranks_per_node=2"])
    if settings.nodes * settings.ranks_per_node == 1:
        raise ConfigError("one rank has nobody to talk to: give nodes=2, or job.ranks_per_node=2")
    if "job.requeue" not in given:
        settings.job.requeue = False
    if settings.job.time_limit is None:
        minutes = -(-(settings.job.preflight_s + AROUND_S) // 60)
        settings.job.time_limit = f"{int(minutes // 60):02}:{int(minutes % 60):02}:00"
    return settings


def show(run: "RunFolder") -> int:
    """Print the report of a run's network test; return its exit code. Raises UserError if there is none yet."""
    if not (run.nccl / VERDICT).exists() and run.failed.exists():
        # A full disk leaves it empty.
        reason = run.failed.read_text().strip() or f"the network test did not end: {_words(run)}"
        print(f"trierarch: {BROKEN}: {reason}", file=sys.stderr)
        return BROKEN_CODE
    try:
        verdict = NetworkVerdict.load(run.nccl / VERDICT)
        text = (run.nccl / REPORT).read_text()
    except (OSError, UserError):
        raise UserError(f"run {run.name} has no report of a network test (yet): see its logs") from None
    print(text, end="")
    print(f"\nfiles: {run.nccl}")
    return verdict.exit_code


def _words(run: "RunFolder") -> str:
    """Return why a test has ended, as its newest event or else a rank's log says it, else where to look."""
    from contract.run_folder import Event

    tested = [one for one in run.read_events() if one.get("event") == Event.NETWORK_TESTED]
    told = [str(one.get("reason") or "") for one in tested[-1:]]
    pattern = Path(logs_of(run.logs))
    logs = sorted(pattern.parent.glob(pattern.name), key=lambda log: log.stat().st_mtime, reverse=True)
    return next(filter(None, [*told, *map(last_words, logs)]), f"see {run.logs}")


def _wait(run: "RunFolder") -> None:
    from slurm.runs.status import status

    while status(run.path)[0].state.is_live:
        time.sleep(LOOK_EVERY_S)
