"""`trierarch cluster`: the profiles of machines, and a new one from what a Slurm says of itself."""

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from contract.errors import ConfigError, UserError, closest

if TYPE_CHECKING:
    from slurm.sites.profile import Profile

app = typer.Typer(no_args_is_help=True, help="Profiles: what a machine wants in a batch script.")

SECTIONS = {
    "queue": [
        *(
            "account",
            "account_required",
            "partition",
            "qos",
            "constraint",
            "reservation",
            "time_limit",
            "exclusive",
        ),
        *("requeue", "max_array_size", "max_submit_jobs", "sbatch_lines", "template"),
    ],
    "node": [
        *(
            "gpu_directive",
            "gpu_type",
            "gpus_per_node",
            "gpu_model",
            "gpu_memory_gb",
            "gpu",
            "cpus_per_node",
            "memory",
        ),
        *("ranks_per_node", "gpu_cpus", "cpu_bind"),
    ],
    "network": [
        *("socket_interface", "hcas", "nics_per_node", "nic_gbit"),
        *("master_suffix", "topology", "topology_file"),
    ],
    "software": [
        *(
            "launch",
            "mpi",
            "python",
            "container",
            "modules",
            "setup",
            "env",
            "unset",
            "stop_signal",
            "stop_margin_s",
        ),
        *("scratch_shared", "scratch_local", "scheduler", "host_patterns"),
    ],
}
"""Every field of a profile but those that have a place of their own in `show`."""
APART = ("name", "description", "sources", "unverified", "limits")


@app.command("list")
def list_profiles() -> None:
    """Name every profile; `*` marks the one that is taken here."""
    import configs.compose

    names = configs.compose.choices("cluster")
    here, why = _detected()
    width = max(map(len, names))
    for name in names:
        print(f"{'*' if name == here else ' '} {name:{width}}  {_description(name)}")
    print(f"\n{here + ' is taken here' if here else 'none is taken here'}: {why}")


@app.command()
def show(
    name: Annotated[
        str | None, typer.Argument(help="A profile. Default: the one that is taken here.")
    ] = None,
) -> None:
    """Show a profile: what it asks for, the site's limits, where it is from, what is not known."""
    from slurm.settings import SubmitConfig
    from slurm.sites.limits import describe

    here, why = _detected()
    chosen = name or here
    if chosen is None:
        raise ConfigError(f"no profile fits this machine ({why}): name one, see `trierarch cluster list`")
    profile = _load(chosen)
    print(f"{profile.name}: {profile.description}")
    print(f"taken here: {'yes' if chosen == here else f'no, {here} is'} ({why})")
    unset: list[str] = []
    for title, keys in SECTIONS.items():
        print(f"\n{title}")
        for key in keys:
            text = _text(getattr(profile, key))
            if text:
                print(f"  {key:17} {text}")
            else:
                unset.append(key)
    print(f"\nnot set, left to Slurm, NCCL or the job: {', '.join(unset)}")
    if profile.limits:
        print("\nlimits")
    for limit in profile.limits:
        named = " ".join(
            f"job.{key}={value}" for key in ("partition", "qos") if (value := getattr(limit, key))
        )
        print(
            f"  {named or 'the default'}: {describe(limit)}{f' ({limit.comment})' if limit.comment else ''}"
        )
    for title, lines in (("from", profile.sources), ("not verified", profile.unverified)):
        if lines:
            print(f"\n{title}")
        for line in lines:
            print(f"  - {line}")
    notes = SubmitConfig(cluster=profile).notes(os.environ)
    if notes:
        print("\nyour shell\n" + "\n".join(f"  - {note}" for note in notes))


@app.command()
def init(
    name: Annotated[
        str | None, typer.Argument(help="The new profile's name. Default: the cluster's own.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option(help="Where jobs go by default. Default: the one with most GPU nodes.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where to write it. Default: configs/cluster/NAME.yaml.")
    ] = None,
    probe: Annotated[bool, typer.Option(help="Look at a node too, by a job of some seconds.")] = False,
    probe_wait_s: Annotated[int, typer.Option(min=1, help="How long that job may wait in the queue.")] = 300,
    account: Annotated[str | None, typer.Option(help="The account of that job.")] = None,
    force: Annotated[bool, typer.Option(help="Replace a file that is there.")] = False,
) -> None:
    """Write a profile of this machine from what its Slurm says."""
    import configs.compose
    from slurm.sites import discover
    from slurm.sites.profile import Profile

    if account and not probe:
        raise ConfigError("--account is for the job of --probe: give that too")
    profile = discover.discover(name, partition, os.environ)
    if not (profile.name.isascii() and profile.name.isidentifier()):
        raise ConfigError(f"{profile.name}: a profile's name has the letters a-z, digits and _ only")
    path = output or configs.compose.FOLDER / "cluster" / f"{profile.name}.yaml"
    if path.exists() and not force:  # before a job is run for nothing
        raise ConfigError(f"{path} is there already: give --force to replace it, or another name")
    if probe:
        discover.add_probe(profile, discover.probe_node(profile, os.environ, account, probe_wait_s))
    discover.write_profile(profile, path, force)
    configs.compose.load(path, Profile)
    print(f"{path} is written, partition {profile.partition}; not known:")
    print("\n".join(f"  - {line}" for line in profile.unverified))
    if output is None:
        print(f"look:  trierarch cluster show {profile.name}")
        print(f"try:   trierarch submit --dry-run cluster={profile.name} ...")


def _detected() -> tuple[str | None, str]:
    from slurm.sites.detect import detect_and_say_why

    try:
        return detect_and_say_why(socket.gethostname(), os.environ)
    except UserError as error:
        return None, str(error)


def _load(name: str) -> "Profile":
    import configs.compose
    from slurm.sites.profile import Profile

    names = configs.compose.choices("cluster")
    if name not in names:
        raise ConfigError(f"{name}: there is no such profile, {closest(name, names)}")
    return configs.compose.load(configs.compose.FOLDER / "cluster" / f"{name}.yaml", Profile)


def _description(name: str) -> str:
    """Read one line of a profile: a file that is wrong must not hide the others, and reading all takes its time."""
    import yaml

    import configs.compose

    path = configs.compose.FOLDER / "cluster" / f"{name}.yaml"
    try:
        tree = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)
        return str(tree.get("description", ""))
    except (OSError, UnicodeDecodeError, AttributeError, yaml.YAMLError):
        return f"({path} is no profile that can be read: correct it)"


def _text(value: Any) -> str:
    """Write a setting; empty for one that is not set."""
    from slurm.sites.profile import Container, ContainerRuntime

    if isinstance(value, Container):
        return (
            "" if value.runtime is ContainerRuntime.none else f"{value.runtime} {value.image} {value.binds}"
        )
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key}={entry}" for key, entry in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None or value == "" or value == "none" else str(value)
