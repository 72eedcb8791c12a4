"""Which profile is this machine's, and which Slurm a profile means."""

import fnmatch
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import configs.compose
from contract.errors import ConfigError, UserError
from slurm.client import ask

# Names a lab for commands that the lab started.
LAB_VARIABLE = "TRIERARCH_LAB"
# The lab's ClusterName, which no site has.
LAB_CLUSTER = "trierarch_lab"
NOT_CONFIGURED = re.compile("Could not establish a configuration source|Unable to process configuration file")


def detect(hostname: str, environ: Mapping[str, str]) -> str:
    """Name the profile of this machine: a lab that is meant, the one with this host's name, the one with the name
    of the Slurm cluster that answers, any Slurm, the lab that is up, local.

    Raises ConfigError if there is a Slurm that does not answer: training on a login node is no substitute.
    """
    name, _ = detect_and_say_why(hostname, environ)
    return name


def detect_and_say_why(hostname: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return what `detect` does, and what it was found by."""
    if _names_a_lab(environ):
        return "lab", f"{LAB_VARIABLE} or SLURM_CONF names a lab"
    for name, patterns in _host_patterns().items():
        for pattern in patterns:
            if fnmatch.fnmatch(hostname, pattern):
                return name, f"this host, {hostname}, matches {pattern}"
    if shutil.which("sbatch", path=environ.get("PATH")):
        cluster = _cluster_name(environ)
        if cluster == LAB_CLUSTER:
            return "lab", f"the Slurm that answers calls itself {cluster}"
        # A site that calls its cluster "local" does not mean this machine.
        if cluster in set(configs.compose.choices("cluster")) - {"lab", "local"}:
            return cluster, f"the Slurm that answers calls itself {cluster}"
        if cluster is not None:
            return "slurm", f"the Slurm that answers calls itself {cluster}, and no profile is called so"
    if _default_lab() is not None:
        return "lab", "a lab is up on this machine, and no other Slurm answers"
    return "local", "no Slurm answers here"


def scheduler_environment(profile: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that point Slurm's commands at the profile's Slurm: a lab's SLURM_CONF, else none.

    Raises ConfigError if a lab is meant and there is none.
    """
    env = os.environ if environ is None else environ
    if profile != "lab":
        return {}
    if env.get(LAB_VARIABLE):
        return {"SLURM_CONF": str(Path(env[LAB_VARIABLE]) / "slurm.conf")}
    if _names_a_lab(env):
        return {"SLURM_CONF": env["SLURM_CONF"]}
    found = _default_lab()
    if found is None:
        raise ConfigError("cluster=lab: no lab is up on this machine, run `make lab-up`")
    return found


def _names_a_lab(environ: Mapping[str, str]) -> bool:
    if environ.get(LAB_VARIABLE):
        return True
    try:
        text = Path(environ["SLURM_CONF"]).read_text()
    except (KeyError, OSError, UnicodeDecodeError):
        return False
    return re.search(rf"^ClusterName={LAB_CLUSTER}\s*$", text, re.MULTILINE | re.IGNORECASE) is not None


def _host_patterns() -> dict[str, list[str]]:
    from omegaconf import OmegaConf

    files = sorted((configs.compose.FOLDER / "cluster").glob("*.yaml"))
    return {path.stem: OmegaConf.select(OmegaConf.load(path), "host_patterns", default=[]) for path in files}


def _cluster_name(environ: Mapping[str, str]) -> str | None:
    """Return the name of the cluster whose controller answers, None if Slurm is not configured here."""
    answer = ask(["scontrol", "show", "config"], environ)
    match = re.search(r"^ClusterName\s*=\s*(\S+)", answer.output, re.MULTILINE)
    if answer.code == 0 and match:
        return match[1]
    if NOT_CONFIGURED.search(answer.error):
        return None
    raise ConfigError("Slurm does not answer: try again, or give cluster=local to train on this machine")


def _default_lab() -> dict[str, str] | None:
    """Return the environment of the user's own lab if it is up."""
    from slurm.lab.cluster import Lab
    from slurm.lab.folder import default_folder

    lab = Lab(default_folder())
    try:
        return lab.environment() if lab.is_up() else None
    except UserError:  # somebody else's folder has that name: it is no lab of this user
        return None
