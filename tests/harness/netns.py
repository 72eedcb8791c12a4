"""Nodes of a cluster as network namespaces of this host: each with its own address, at the rates that a test wants.

Bridges and the switches' ends of all cables are in a namespace of their own: the host's network is left alone, and
whatever becomes of a test, deleting its namespaces removes everything.
"""

import itertools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

NAMES = Path("/run/netns")
INTERFACE = "eth0"
_PREFIX = "trierarch"
_FAST_MBIT = 1000.0
"""Of whatever nothing is said about: fast enough for tests and no load for their host."""
_BURST_BYTES = 20_000
_QUEUE_BYTES = 300_000
_numbers = itertools.count()


def why_not() -> str:
    """Say why this host can't have namespaces; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"network namespaces need the program {missing[0]} (package iproute2)"
    name = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}-try"
    commands = [
        f"ip netns add {name}",
        f"ip -n {name} link add {INTERFACE} type veth peer name peer",
        f"ip netns exec {name} tc qdisc add dev {INTERFACE} root handle 1: htb default 1",
        f"ip -n {name} link add bridge type bridge",
    ]
    try:
        for command in commands:
            _run(command)
    except subprocess.CalledProcessError as error:
        return f"this kernel has no network namespaces with rates ({command}: {error.stderr.strip()})"
    finally:
        with suppress(subprocess.CalledProcessError):
            _remove(name)
    return ""


class Fabric:
    """Some nodes and the switches between them; a context manager.

    nic_mbit: the rate of a node's adapter, in and out, of each node that is named here; links_mbit: that between two
    nodes, each way. With `leaves` (lists of nodes) each leaf is a switch of its own, and all are joined by one more at
    `uplink_mbit` each, in and out; else there is one switch. What nothing is said about has 1 Gbit/s.
    """

    def __init__(
        self,
        nodes: int,
        *,
        nic_mbit: Mapping[int, float] | float = _FAST_MBIT,
        links_mbit: Mapping[tuple[int, int], float] | None = None,
        leaves: Sequence[Sequence[int]] | None = None,
        uplink_mbit: float = _FAST_MBIT,
    ) -> None:
        self.nodes = nodes
        self._nic = dict.fromkeys(range(nodes), nic_mbit) if isinstance(nic_mbit, float | int) else nic_mbit
        self._links = links_mbit or {}
        self._leaves = leaves or [list(range(nodes))]
        self._uplink_mbit = uplink_mbit
        self._name = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._switch = f"{self._name}-switch"

    def __enter__(self) -> Self:
        remove_left_over()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def address(self, node: int) -> str:
        """The address of a node, which the others reach."""
        return f"10.99.0.{node + 1}"

    def namespace(self, node: int) -> Path:
        """The file of a node's namespace: see `enter`."""
        return NAMES / self._node(node)

    def _node(self, node: int) -> str:
        return f"{self._name}-node{node}"

    def _build(self) -> None:
        for name in (self._switch, *map(self._node, range(self.nodes))):
            _run(f"ip netns add {name}")
            _run(f"ip -n {name} link set lo up")
        for number, members in enumerate(self._leaves):
            self._bridge(f"leaf{number}")
            for node in members:
                self._cable(node, f"leaf{number}")
        if len(self._leaves) > 1:
            self._bridge("spine")
            for number in range(len(self._leaves)):
                up, down = f"up{number}", f"down{number}"
                self._in_switch(f"ip link add {up} type veth peer name {down}")
                self._plug(up, f"leaf{number}", self._uplink_mbit)
                self._plug(down, "spine", self._uplink_mbit)

    def _bridge(self, name: str) -> None:
        self._in_switch(f"ip link add {name} type bridge")
        self._in_switch(f"ip link set {name} up")

    def _cable(self, node: int, leaf: str) -> None:
        name, rate = self._node(node), self._nic.get(node, _FAST_MBIT)
        _run(f"ip -n {name} link add {INTERFACE} type veth peer name port{node} netns {self._switch}")
        self._plug(f"port{node}", leaf, rate)
        _run(f"ip -n {name} addr add {self.address(node)}/24 dev {INTERFACE}")
        _run(f"ip -n {name} link set {INTERFACE} up")
        slow = {
            self.address(b if a == node else a): mbit
            for (a, b), mbit in self._links.items()
            if node in (a, b)
        }
        _shape(name, INTERFACE, rate, slow)

    def _plug(self, port: str, bridge: str, mbit: float) -> None:
        self._in_switch(f"ip link set {port} master {bridge}")
        self._in_switch(f"ip link set {port} up")
        _shape(self._switch, port, mbit)

    def _in_switch(self, command: str) -> None:
        _run(command.replace("ip ", f"ip -n {self._switch} ", 1))

    def _remove(self) -> None:
        for name in (*map(self._node, range(self.nodes)), self._switch):
            with suppress(subprocess.CalledProcessError):
                _remove(name)


def enter(namespace: Path) -> None:
    """Move this process, of one thread, to a namespace."""
    import ctypes  # os.setns comes with Python 3.12

    descriptor = os.open(namespace, os.O_RDONLY)
    failed = ctypes.CDLL(None, use_errno=True).setns(descriptor, 0x40000000)  # CLONE_NEWNET
    os.close(descriptor)
    if failed:
        raise OSError(ctypes.get_errno(), f"{namespace} cannot be entered")


def remove_left_over() -> None:
    """Remove what tests left behind that were killed."""
    for path in NAMES.glob(f"{_PREFIX}-*"):
        found = re.match(rf"{_PREFIX}-(\d+)-", path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            with suppress(subprocess.CalledProcessError):
                _remove(path.name)


def _shape(name: str, interface: str, mbit: float, slow: Mapping[str, float] | None = None) -> None:
    """Limit what leaves an interface, and further what goes to some addresses."""
    tc = f"ip netns exec {name} tc"
    _run(f"{tc} qdisc add dev {interface} root handle 1: htb default 2")
    classes = {"1:1": ("1:", mbit), "1:2": ("1:1", mbit)}
    classes |= {f"1:{number}": ("1:1", rate) for number, rate in enumerate(slow.values(), 10)} if slow else {}
    for own, (parent, rate) in classes.items():
        limits = f"rate {rate}mbit burst {_BURST_BYTES} cburst {_BURST_BYTES} quantum 60000"
        _run(f"{tc} class add dev {interface} parent {parent} classid {own} htb {limits}")
        if own != "1:1":
            _run(f"{tc} qdisc add dev {interface} parent {own} bfifo limit {_QUEUE_BYTES}")
    for number, address in enumerate(slow or {}, 10):
        match = f"protocol ip u32 match ip dst {address}/32 flowid 1:{number}"
        _run(f"{tc} filter add dev {interface} parent 1: {match}")


def _remove(name: str) -> None:
    """End the processes of a namespace and delete it."""
    for word in _run(f"ip netns pids {name}").split():
        with suppress(ProcessLookupError):
            os.kill(int(word), signal.SIGKILL)
    _run(f"ip netns del {name}")


def _run(command: str) -> str:
    return subprocess.run(command.split(), check=True, capture_output=True, text=True, timeout=20).stdout
