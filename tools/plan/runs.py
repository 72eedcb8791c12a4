"""Our own finished or running trainings as measurements that the planner can be calibrated with."""

import statistics
from pathlib import Path

from configs.compose import load
from contract.errors import ConfigError
from contract.run_folder import RunFolder, read_json_lines
from slurm.settings import SubmitConfig
from tools.plan.calibrate import Measured
from tools.plan.own import case_of, machine_of
from train.config import read_config
from train.layout.check import lay_out

WARMING_UP = 2
"""Logged steps that are left out: compilers and allocators are at work."""
FEWEST = 5
"""Logged steps that make a measurement."""


def measured_run(folder: Path) -> Measured:
    """Return what a submitted run measured: the median of its logged step times, on the cluster it was submitted to.

    Raises `ConfigError` for a run that was not submitted, or has too few logged steps.
    """
    run = RunFolder(folder)
    submitted = folder / "submit.yaml"
    if not submitted.exists():
        raise ConfigError(
            f"{folder} was not submitted to a cluster: there is no {submitted.name} that says its GPUs"
        )
    settings, config = load(submitted, SubmitConfig), read_config(run.config)
    each = settings.ranks_per_node
    dims = lay_out(config, settings.job.nodes * each, each)
    machine = machine_of(settings.cluster, settings.job.nodes, each)
    times = [line["step_time_s"] for line in read_json_lines(run.metrics) if "step_time_s" in line][
        WARMING_UP:
    ]
    if len(times) < FEWEST:
        raise ConfigError(
            f"{folder} has {len(times)} step times after the first {WARMING_UP}: log at least {FEWEST} "
            "(loop.log_every_steps)"
        )
    return Measured(
        folder.name, case_of(config, dims, machine), statistics.median(times), f"run {folder.name}"
    )
