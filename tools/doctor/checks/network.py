"""Names of interfaces and adapters that NCCL and gloo are told."""

from collections.abc import Iterator, Mapping

from tools.doctor.facts import Facts
from tools.doctor.finding import About, Finding, NotCheckedError, NoUseError, check, error, note, warning
from tools.doctor.host import Place

SOCKETS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
ADAPTERS = "NCCL_IB_HCA"
USELESS = ("lo", "docker", "virbr", "podman", "cni")
"""Beginnings of interfaces that lead to no other node."""


@check("network interfaces", About.environment)
def interfaces(facts: Facts) -> Iterator[Finding]:
    """Names for sockets: are they here, and do they lead anywhere?"""
    named = _named(facts, SOCKETS)
    if not named:
        raise NoUseError("none is named: NCCL and gloo choose")
    for origin, text in named.items():
        names = _names(text)
        if facts.settings.job.nodes > 1 and not text.startswith("^"):
            for name in names:
                if name == "lo" or name.startswith(USELESS[1:]):
                    yield error(
                        origin,
                        f"{origin}={text}: {name} leads to no other node",
                        "name the interface of the fast network",
                    )
    facts.need_here()
    there = facts.host.interfaces
    if not there:
        raise NotCheckedError("/sys/class/net shows none")
    for origin, text in named.items():
        if text.startswith("^"):
            continue
        exact = _is_exact(origin, text)
        lacking = [name for name in _names(text) if not _is_there(name, there, exact)]
        # One that is there is enough for NCCL; gloo takes each name as it is.
        if lacking and (len(lacking) == len(_names(text)) or origin.startswith("GLOO")):
            yield _absent(facts, origin, text, lacking, there)


@check("InfiniBand adapters", About.environment)
def adapters(facts: Facts) -> Iterator[Finding]:
    """Names of adapters: are they here?"""
    named = _named(facts, (ADAPTERS,))
    if not named:
        raise NoUseError("none is named: NCCL chooses")
    facts.need_here()
    there = facts.host.adapters
    if not there and facts.host.place is Place.login:
        raise NotCheckedError("this login node has none: run it in a job too")
    for origin, text in named.items():
        if text.startswith("^"):
            continue
        names = [name.partition(":")[0] for name in _names(text)]
        lacking = [name for name in names if not _is_there(name, there, _is_exact(origin, text))]
        if lacking:
            yield _absent(facts, origin, text, lacking, there)


def _absent(facts: Facts, origin: str, text: str, lacking: list[str], there: tuple[str, ...]) -> Finding:
    what = (
        f"{origin}={text}: this host has no {' and no '.join(lacking)} (it has {', '.join(there) or 'none'})"
    )
    if facts.host.place is Place.login:
        return note(origin, f"{what}; compute nodes may", "run `trierarch doctor` in a job too")
    return error(origin, what, "name one that is there, or leave it out: NCCL and gloo choose")


def _named(facts: Facts, variables: tuple[str, ...]) -> Mapping[str, str]:
    """What is named by the profile, else by the shell: the job's script exports the profile's, which wins."""
    cluster, environ = facts.cluster, facts.host.environ
    found: dict[str, str] = {}
    own = {
        "NCCL_SOCKET_IFNAME": ("cluster.socket_interface", cluster.socket_interface),
        "GLOO_SOCKET_IFNAME": ("cluster.socket_interface", cluster.socket_interface),
        ADAPTERS: ("cluster.hcas", ",".join(cluster.hcas)),
    }
    for variable in variables:
        key, value = own[variable]
        for origin, text in (
            (f"cluster.env.{variable}", cluster.env.get(variable)),
            (key, value),
            (variable, environ.get(variable)),
        ):
            if text:
                found[origin] = text
                break
    return found


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.lstrip("^=").split(",") if name.strip()]


def _is_exact(origin: str, text: str) -> bool:
    """NCCL takes beginnings of names unless told otherwise; gloo, and what we export of a profile, whole names."""
    return text.startswith("=") or "NCCL" not in origin


def _is_there(name: str, there: tuple[str, ...], exact: bool) -> bool:
    return name in there if exact else any(one.startswith(name) for one in there)


@check("variables of NCCL", About.environment)
def nccl_variables(facts: Facts) -> Iterator[Finding]:
    """Settings that somebody left in the shell, and that slow all down."""
    facts.need_gpus()
    environ, many = facts.host.environ, facts.settings.job.nodes > 1
    for name, value, what in (
        ("NCCL_IB_DISABLE", "1", "NCCL leaves InfiniBand alone and goes through sockets"),
        ("NCCL_P2P_DISABLE", "1", "GPUs of a node exchange through the host's memory"),
        ("NCCL_SHM_DISABLE", "1", "GPUs of a node may exchange through the network"),
        ("CUDA_LAUNCH_BLOCKING", "1", "each operation waits for the one before"),
    ):
        if environ.get(name) == value and (many or name != "NCCL_IB_DISABLE"):
            yield warning(name, f"{name}={value} of your shell goes into the job: {what}", f"unset {name}")
