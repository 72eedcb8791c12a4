"""The `trierarch` command: parses, then calls the part that does the work.

This is the one module that knows both `slurm` and `train`. It imports what a command needs inside that
command: a login node must answer in under half a second.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from contract.errors import ConfigError, UserError
from tools.cli_ckpt import app as ckpt_app
from tools.cli_cluster import app as cluster_app
from tools.cli_data import app as data_app
from tools.cli_deepspeed import DeepSpeedFile, with_deepspeed
from tools.cli_doctor import app as doctor_app
from tools.cli_lab import app as lab_app
from tools.cli_layout import app as layout_app
from tools.cli_nccl import app as nccl_app
from tools.cli_nvme import app as nvme_app
from tools.cli_plan import app as plan_app
from tools.cli_plan import with_plan
from tools.cli_runs import app as runs_app
from tools.cli_sweep import app as sweep_app

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train large models on Slurm supercomputers: one command in, a finished run out.",
)
app.add_typer(ckpt_app, name="ckpt")
app.add_typer(cluster_app, name="cluster")
app.add_typer(data_app, name="data")
app.add_typer(doctor_app)
app.add_typer(lab_app, name="lab")
app.add_typer(layout_app)
app.add_typer(nccl_app, name="nccl")
app.add_typer(nvme_app)
app.add_typer(plan_app, name="plan")
app.add_typer(runs_app)
app.add_typer(sweep_app, name="sweep")

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings: model=llama_25m optim.lr=3e-4")
]


@app.command()
def train(
    overrides: Overrides = None,
    ranks: Annotated[
        int | None, typer.Option(help="Processes on this machine. Default: one for each GPU, or one.")
    ] = None,
    cfg: Annotated[
        str | None, typer.Option(help="`job` prints the whole resolved configuration and ends.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build one rank of a layout here, show what it holds, and end.")
    ] = False,
    nodes: Annotated[int | None, typer.Option(help="With --dry-run: nodes, in place of --ranks.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help="With --dry-run: ranks on each node.")] = None,
    rank: Annotated[int | None, typer.Option(help="With --dry-run: the rank to build. Default: 0.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
    deepspeed: DeepSpeedFile = None,
) -> None:
    """Train on this machine; Ctrl-C stops with a checkpoint and the same command continues from it."""
    from configs.compose import to_yaml
    from slurm.foreground import run_in_foreground
    from slurm.launch import local_gpus, mpi_command
    from slurm.recipe import job_of
    from slurm.runs.find import refuse_sweep
    from train.config import load_config
    from train.data.vocabulary import with_vocabulary
    from train.layout.check import lay_out

    if dry_run:
        from tools.cli_dry_run import show_dry_run

        if cfg is not None:
            raise ConfigError("--cfg prints and ends, as --dry-run does: give one of the two")
        _refuse_sections(overrides or [])
        show_dry_run(overrides or [], ranks, nodes, ranks_per_node, rank or 0, as_json, deepspeed)
        return
    for option, asked in (
        ("--nodes", nodes is not None),
        ("--ranks-per-node", ranks_per_node is not None),
        ("--rank", rank is not None),
        ("--json", as_json),
    ):
        if asked:
            raise ConfigError(f"{option} does nothing without --dry-run: leave it out, or add --dry-run")
    if cfg not in (None, "job"):
        raise ConfigError(f"--cfg {cfg}: only `--cfg job` can be printed")
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks {ranks}: start at least one")
    _refuse_sections(overrides or [])
    count = ranks or max(1, local_gpus())
    overrides = with_deepspeed(deepspeed, overrides or [], count)
    config = load_config(overrides)
    refuse_sweep(config.run_folder.path)
    if cfg:
        print(to_yaml(config), end="")
        return
    command = [sys.executable, "-m", "train", *overrides]
    lay_out(with_vocabulary(config), count, count, on_gpus=local_gpus() > 0)
    if (job := job_of(overrides or [])) is not None:
        print(f"note:  configs/job/{job}.yaml, the recipe's job, is for `trierarch submit`", file=sys.stderr)
    argv, environment = mpi_command(count, command)
    print(f"run {config.run.name}: starting {count} rank{'s' * (count > 1)}", flush=True)
    stop_signal = signal.Signals[config.resilience.stop_signal]
    raise typer.Exit(run_in_foreground(argv, environment, stop_signal))


@app.command()
def submit(
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "--render", help="Print the batch script, submit nothing.")
    ] = False,
    deepspeed: DeepSpeedFile = None,
) -> None:
    """Train as a batch job; `job.nodes=2` and `cluster=NAME` say where, the rest is as for `train`."""
    from configs.compose import to_yaml
    from slurm.recipe import split
    from slurm.settings import Preflight, load_submit
    from slurm.submit import submit as submit_run
    from tools.data_check import missing_data
    from train.comm.check import check_plan
    from train.config import load_config
    from train.data.vocabulary import with_vocabulary
    from train.layout.check import lay_out
    from train.layout.memory import heaviest, lines
    from train.layout.notes import notes

    overrides = with_plan(overrides or [])
    where, what = split(overrides)
    config = load_config(what) if deepspeed is None else None
    settings = load_submit(where)
    ranks = settings.job.nodes * settings.ranks_per_node
    if config is None:  # which takes the number of ranks
        config = load_config(with_deepspeed(deepspeed, what, ranks))
    on_gpus = settings.cluster.gpus_per_node > 0
    sized = with_vocabulary(config)
    dims = lay_out(sized, ranks, settings.ranks_per_node, on_gpus)
    if settings.job.preflight is Preflight.none:
        check_plan(sized, dims, settings.ranks_per_node)
    for note in [*missing_data([config.data.prefix]), *notes(config, dims, settings.ranks_per_node)]:
        print(f"note:  {note}", file=sys.stderr)
    if config.offload.is_used and sized.model.vocab_size is not None:
        rank, kept = heaviest(sized, dims, "cuda" if on_gpus else "cpu")
        print("\n".join(lines(rank, kept, config.offload)), file=sys.stderr)
    submission = submit_run(config.run_folder, to_yaml(config), settings, dry_run=dry_run)
    if dry_run:
        print(submission.script, end="")
        return
    print(submission.summary())


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(help="The run folder, for example runs/first-run.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to add at most.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="Draw among that many of the likeliest.")] = 50,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
) -> None:
    """Continue a text with the newest whole checkpoint of a run."""
    from train.generate import generate as continue_text

    print(
        continue_text(run, prompt, count=tokens, temperature=temperature, top_k=top_k, seed=seed),
    )


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The run folder, for example runs/first-run.")],
    folder: Annotated[Path, typer.Argument(help="Where to write config.json and the safetensors files.")],
) -> None:
    """Write the newest whole checkpoint of a run as a Hugging Face Llama model."""
    from train.generate import export as export_run

    step = export_run(run, folder)
    print(f"step {step} of {run} is in {folder}")


def _refuse_sections(overrides: list[str]) -> None:
    from configs.compose import key_of
    from slurm.settings import says_where

    for override in overrides:
        if says_where(key_of(override)):
            raise ConfigError(f"{override}: this says where a batch job runs, use it with `trierarch submit`")
        if key_of(override) == "parallel":
            raise ConfigError(
                f"{override}: a plan is for a cluster, give parallel=auto to `trierarch submit`, `layout` or `plan`"
            )


def main() -> None:
    """Run the command; a `UserError` is one sentence and its exit code."""
    try:
        app()
    except UserError as error:
        print(f"trierarch: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of our output, `head` for example, has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
