"""A job and a profile -> the text of the batch script, from `templates/job.sbatch.j2`."""

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from contract.errors import ConfigError
from contract.run_folder import RunFolder
from slurm.launch import mpi_command
from slurm.profile import GpuDirective, Profile, Scheduler
from slurm.settings import OF_THE_QUEUE, SubmitConfig

_TEMPLATES = Path(__file__).parent / "templates"
# srun waits this long for the last rank after the first one ended, so that a stuck rank can't hold the nodes.
_LAST_RANK_WAIT_S = 300
_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


def render(run: RunFolder, settings: SubmitConfig, environ: Mapping[str, str] | None = None) -> str:
    """Write the script that trains `run`: a batch script for Slurm, a shell script without it.

    `environ` is the submitting shell's. Raises ConfigError for a path or a setting that no script can carry.
    """
    run = RunFolder(run.path.absolute())
    _check_text("the run folder's path", str(run.path))
    if "{" in str(run.path):
        raise ConfigError(f"the run folder's path {run.path} has a brace in it: give it another name")
    cluster = settings.cluster
    train = [_python(cluster), "-u", "-m", "train", "--config", str(run.config)]
    exports = _exports(settings)
    options: list[str] = []
    if cluster.scheduler is Scheduler.slurm:
        options = _options(run, settings, environ or {})
        launch = _srun(run, settings)
    else:
        command, extra = mpi_command(settings.ranks_per_node, train)
        # The command may be the bare trainer; what comes before it starts the ranks.
        launch, train = command[: len(command) - len(train)], command[len(command) - len(train) :]
        exports = extra | exports
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = shlex.quote
    environment.filters["join_quoted"] = shlex.join
    environment.filters["comment"] = lambda text: " ".join(text.split())
    return environment.get_template("job.sbatch.j2").render(
        title=f"Run {run.name} on {cluster.name}: {cluster.description or 'a training run'}",
        options=options,
        modules=cluster.modules,
        setup=cluster.setup,
        exports=exports,
        unset=[_checked_name("cluster.unset", name) for name in cluster.unset],
        code=str(run.code),
        supervise=_supervise(run, settings),
        launch=launch,
        train=train,
    )


def _python(cluster: Profile) -> str:
    return cluster.python or sys.executable


def _options(run: RunFolder, settings: SubmitConfig, environ: Mapping[str, str]) -> list[str]:
    """Return the #SBATCH options, quoted as sbatch reads them."""
    job, cluster = settings.job, settings.cluster
    values: dict[str, object] = {
        "job-name": run.name,
        **{name: settings.queue(name, environ) for name in OF_THE_QUEUE},
        "nodes": job.nodes,
        "ntasks-per-node": settings.ranks_per_node,
        "cpus-per-task": settings.cpus_per_rank,
        **_gpus(settings),
        "mem": cluster.memory,
        "exclude": job.exclude,
        "time": settings.time_limit,
        # To the ranks, not to this script: without the form `B:`.
        "signal": f"{cluster.stop_signal.removeprefix('SIG')}@{cluster.stop_lead_s}",
        "open-mode": "append",
        "output": f"{_escape(run.logs)}/%j.batch.log",
    }
    for key, value in values.items():
        _check_text(f"--{key}", str(value))
    options = [f"--{key}={shlex.quote(str(value))}" for key, value in values.items() if value is not None]
    if cluster.exclusive:
        options.append("--exclusive")
    options.append("--requeue" if job.requeue and cluster.requeue else "--no-requeue")
    for line in cluster.sbatch_lines:
        _check_text("cluster.sbatch_lines", line)
    return [*options, *cluster.sbatch_lines]


def _gpus(settings: SubmitConfig) -> dict[str, object]:
    cluster, count = settings.cluster, settings.ranks_per_node
    if cluster.gpu_directive is GpuDirective.none or not cluster.gpus_per_node:
        return {}
    kind = f"{cluster.gpu_type}:" if cluster.gpu_type else ""
    if cluster.gpu_directive is GpuDirective.gres:
        return {"gres": f"gpu:{kind}{count}"}
    return {"gpus-per-node": f"{kind}{count}"}


def _srun(run: RunFolder, settings: SubmitConfig) -> list[str]:
    cluster = settings.cluster
    return [
        "srun",
        "--kill-on-bad-exit=1",
        f"--wait={_LAST_RANK_WAIT_S}",
        f"--mpi={cluster.mpi}",
        *([f"--cpu-bind={cluster.cpu_bind}"] if cluster.cpu_bind else []),
        "--open-mode=append",
        # The supervisor fills in the words in braces, srun the rank.
        f"--output={_escape(run.logs)}/{{job}}.r{{attempt}}.%t.log",
    ]


def _supervise(run: RunFolder, settings: SubmitConfig) -> list[str]:
    job, cluster = settings.job, settings.cluster
    arguments = [f"--max-restarts={job.max_restarts}", f"--stop-signal={cluster.stop_signal}"]
    if cluster.scheduler is Scheduler.local:
        arguments += [f"--log={run.logs}/{{job}}.r{{attempt}}.log"]
    elif job.requeue:
        arguments += [f"--requeue={'slurm' if cluster.requeue else 'successor'}"]
    return [_python(cluster), "-u", "-m", "slurm.supervise", str(run.path), *arguments]


def _exports(settings: SubmitConfig) -> dict[str, str]:
    cluster, cpus = settings.cluster, settings.cpus_per_rank
    exports = {"OMP_NUM_THREADS": str(cpus)} if cpus else {}
    if cpus and cluster.scheduler is Scheduler.slurm:
        # From 22.05 on srun does not take over the job's --cpus-per-task.
        exports["SRUN_CPUS_PER_TASK"] = str(cpus)
    if cluster.socket_interface:
        exports |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), cluster.socket_interface)
    if cluster.master_suffix:
        exports["TRIERARCH_MASTER_SUFFIX"] = cluster.master_suffix
    own = {_checked_name("cluster.env", name): value for name, value in cluster.env.items()}
    return exports | own


def _escape(path: Path) -> str:
    """Keep Slurm from reading a % in the path as one of its patterns."""
    return str(path).replace("%", "%%")


def _checked_name(key: str, name: str) -> str:
    if not _NAME.match(name):
        raise ConfigError(f"{key}: {name!r} is no name of an environment variable")
    return name


def _check_text(what: str, text: str) -> None:
    if not text.isprintable():
        raise ConfigError(
            f"{what} has a line break or a character that cannot be printed: {text!a}, give it another name"
        )
