"""A job and a profile -> the text of the batch script, from `templates/job.sbatch.j2` or the user's own template."""

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, StrictUndefined, TemplateError

from contract.errors import ConfigError
from contract.run_folder import RunFolder
from slurm.command import agent_command, escape, rank_cpus, step_command
from slurm.settings import OF_THE_QUEUE, Preflight, SubmitConfig
from slurm.sites.profile import GpuDirective, Launch, Scheduler

_TEMPLATES = Path(__file__).parent / "templates"
_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


def render(
    run: RunFolder,
    settings: SubmitConfig,
    environ: Mapping[str, str] | None = None,
    *,
    sweep: bool = False,
    only_network_test: bool = False,
) -> str:
    """Write the script that trains `run`: a batch script for Slurm, a shell script without it.

    With `sweep`, `run` is a sweep's folder and the script is the one of each task of its arrays; with
    `only_network_test` nothing is trained. `environ` is the
    submitting shell's. Raises ConfigError for a path, a setting or a template that gives no script.
    """
    run = RunFolder(run.path.absolute())
    _check_path(run.path, settings, sweep)
    cluster = settings.cluster
    exports = _exports(settings)
    if settings.launch is Launch.agents:
        command = agent_command(run, settings)
    else:
        command, extra = step_command(run, settings, sweep)
        exports = extra | exports
    text = _template(settings).render(
        title=f"{'Sweep' if sweep else 'Run'} {run.name} on {cluster.name}: {cluster.description or 'a training run'}",
        options=_options(run, settings, environ or {}, sweep) if cluster.scheduler is Scheduler.slurm else [],
        modules=cluster.modules,
        setup=cluster.setup,
        exports=exports,
        unset=[_checked_name("cluster.unset", name) for name in cluster.unset],
        code=str(run.code),
        supervise=_supervise(run, settings, only_network_test),
        command=command,
        run=str(run.path),
        cluster=cluster,
        job=settings.job,
    )
    if settings.template and not (text.startswith("#!") and "slurm.supervise" in text):
        raise ConfigError(
            f"{settings.template}: a script from it does not begin with #! or does not start slurm.supervise: "
            'let it extend the built-in template by {% extends "job.sbatch.j2" %}'
        )
    return text


class _Template:
    """A Jinja2 template whose errors name the user's file."""

    def __init__(self, text: str, environment: Environment, path: str) -> None:
        self._text, self._environment, self._path = text, environment, path

    def render(self, **variables: object) -> str:
        try:
            return self._environment.from_string(self._text).render(variables)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            where = f" line {line}" if line else ""
            raise ConfigError(f"{self._path}{where}: {' '.join(str(error).split())}") from error


def _template(settings: SubmitConfig) -> _Template:
    path = Path(settings.template).expanduser() if settings.template else _TEMPLATES / "job.sbatch.j2"
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(
            f"the template {path} cannot be read ({reason}): correct job.template or cluster.template"
        ) from error
    environment = Environment(
        # The built-in ones first: a template of the user's with the same name can extend them.
        loader=ChoiceLoader([FileSystemLoader(_TEMPLATES), FileSystemLoader(path.parent)]),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = shlex.quote
    environment.filters["join_quoted"] = shlex.join
    environment.filters["comment"] = lambda text: " ".join(text.split())
    return _Template(text, environment, str(path))


def _options(run: RunFolder, settings: SubmitConfig, environ: Mapping[str, str], sweep: bool) -> list[str]:
    """Return the #SBATCH options, quoted as sbatch reads them."""
    job, cluster = settings.job, settings.cluster
    values: dict[str, object] = {
        "job-name": run.name,
        **{name: settings.queue(name, environ) for name in OF_THE_QUEUE},
        "nodes": settings.nodes,
        "ntasks-per-node": settings.ranks_per_node,
        "cpus-per-task": settings.cpus_per_rank,
        **_gpus(settings),
        "mem": cluster.memory,
        "exclude": job.exclude,
        "time": settings.time_limit,
        "open-mode": "append",
        "output": f"{escape(str(run.logs))}/{'%A_%a' if sweep else '%j'}.batch.log",
    }
    for key, value in values.items():
        _check_text(f"--{key}", str(value))
    options = [f"--{key}={shlex.quote(str(value))}" for key, value in values.items() if value is not None]
    if cluster.exclusive:
        options.append("--exclusive")
    if settings.launch is Launch.agents and not settings.contained:
        # A node that dies must not end the job: the supervisor goes on with the others. If it is the supervisor's
        # own, an agent has the job requeued, which takes Slurm's commands: an image seldom has them.
        options.append("--no-kill")
    options.append("--requeue" if job.requeue and cluster.requeue else "--no-requeue")
    for key, lines in (
        ("cluster.sbatch_lines", cluster.sbatch_lines),
        ("job.sbatch_lines", job.sbatch_lines),
    ):
        for line in lines:
            _check_text(key, line)
            options.append(line)
    return options


def _gpus(settings: SubmitConfig) -> dict[str, object]:
    cluster, count = settings.cluster, settings.ranks_per_node
    if cluster.gpu_directive is GpuDirective.none or not cluster.gpus_per_node:
        return {}
    kind = f"{cluster.gpu_type}:" if cluster.gpu_type else ""
    if cluster.gpu_directive is GpuDirective.gres:
        return {"gres": f"gpu:{kind}{count}"}
    return {"gpus-per-node": f"{kind}{count}"}


def _supervise(run: RunFolder, settings: SubmitConfig, only_network_test: bool) -> list[list[str]]:
    """Return the supervisor's command line but for what it starts, as groups of words."""
    job, cluster = settings.job, settings.cluster
    # Outside of any container: the host's interpreter, which needs nothing installed.
    python = sys.executable if settings.contained else cluster.python or sys.executable
    start = [
        f"--launch={settings.launch}",
        f"--nodes={job.nodes}",
        f"--ranks-per-node={settings.ranks_per_node}",
    ]
    end = [
        f"--max-restarts={job.max_restarts}",
        f"--requeue={_requeue(settings)}",
        f"--stop-signal={cluster.stop_signal}",
        f"--stop-margin-s={cluster.stop_margin_s}",
    ]
    if cluster.scheduler is Scheduler.slurm:
        end.append(f"--exclude-for-h={job.exclude_for_h:g}")
    if job.node_order:
        start.append(f"--node-order={Path(job.node_order).expanduser().absolute()}")
    if settings.launch is Launch.agents:
        start += _for_agents(settings)
        start += ["--only-network-test"] if only_network_test else []
    elif cluster.scheduler is Scheduler.local:
        end.append("--log={run}/logs/{job}.r{attempt}.log")
    return [[python, "-u", "-m", "slurm.supervise", str(run.path)], start, end]


def _requeue(settings: SubmitConfig) -> str:
    if settings.cluster.scheduler is Scheduler.local or not settings.job.requeue:
        return "never"
    return "slurm" if settings.cluster.requeue else "successor"


def _for_agents(settings: SubmitConfig) -> list[str]:
    cluster, arguments = settings.cluster, []
    if settings.job.health_check:
        arguments.append("--health-check")
    if settings.job.preflight is Preflight.nccl:
        arguments.append(f"--network-test-s={settings.job.preflight_s:g}")
        if baseline := settings.job.preflight_baseline:
            arguments.append(f"--network-baseline={Path(baseline).expanduser().absolute()}")
    if cluster.gpus_per_node:
        asked = cluster.gpu_directive is not GpuDirective.none
        arguments.append(f"--gpus-per-node={settings.ranks_per_node if asked else cluster.gpus_per_node}")
        if cluster.gpu_memory_gb:
            arguments.append(f"--gpu-memory-gb={cluster.gpu_memory_gb:g}")
    if cluster.master_suffix:
        arguments.append(f"--master-suffix={cluster.master_suffix}")
    if cpus := rank_cpus(settings):
        arguments.append(f"--rank-cpus={cpus}".replace(" ", ""))
    elif cluster.exclusive:
        # Without a map of the GPUs at least each rank has cores, and a NUMA node, of its own.
        arguments.append("--rank-cpus=numa")
    return arguments


def _exports(settings: SubmitConfig) -> dict[str, str]:
    cluster, cpus = settings.cluster, settings.cpus_per_rank
    exports = {"OMP_NUM_THREADS": str(cpus)} if cpus else {}
    if cluster.socket_interface:
        exports |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), cluster.socket_interface)
    if cluster.hcas:
        # "=": these and no other whose name begins so.
        exports["NCCL_IB_HCA"] = "=" + ",".join(cluster.hcas)
        exports["UCX_NET_DEVICES"] = ",".join(hca if ":" in hca else f"{hca}:1" for hca in cluster.hcas)
    if cluster.master_suffix and settings.launch is Launch.step:
        exports["TRIERARCH_MASTER_SUFFIX"] = cluster.master_suffix
    own = {_checked_name("cluster.env", name): value for name, value in cluster.env.items()}
    return exports | own


def _check_path(path: Path, settings: SubmitConfig, sweep: bool) -> None:
    _check_text("the folder's path", str(path))
    if "{" in str(path):
        raise ConfigError(f"the folder's path {path} has a brace in it: give it another name")
    if sweep and settings.launch is Launch.step and "%" in str(path):
        raise ConfigError(
            f"the sweep's path {path} has a % in it, which srun would read as a pattern: give it another name"
        )


def _checked_name(key: str, name: str) -> str:
    if not _NAME.match(name):
        raise ConfigError(f"{key}: {name!r} is no name of an environment variable")
    return name


def _check_text(what: str, text: str) -> None:
    if not text.isprintable():
        raise ConfigError(
            f"{what} has a line break or a character that cannot be printed: {text!a}, give it another name"
        )
