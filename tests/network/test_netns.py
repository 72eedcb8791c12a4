"""The nodes that tests make of namespaces are what they say, and nothing of them is left."""

import os
import subprocess
import sys
import time
from pathlib import Path

from harness import netns
from harness.command import wait_until
from harness.netns import NAMES, Fabric


def ours(pid: int) -> list[Path]:
    return list(NAMES.glob(f"trierarch-{pid}-*"))


def in_node(fabric: Fabric, node: int, code: str) -> "subprocess.Popen[str]":
    command = ["ip", "netns", "exec", fabric.namespace(node).name, sys.executable, "-c", code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_nodes_reach_each_other_at_the_rates_that_were_asked_for() -> None:
    receive = (
        "import socket, time; s = socket.create_server(('', 9000)); c, _ = s.accept(); n = 0; t = 0\n"
        "while d := c.recv(1 << 16): t = t or time.time(); n += len(d)\n"
        "print(n / (time.time() - t) * 8e-6)"
    )
    rates = []
    with Fabric(3, nic_mbit=100, links_mbit={(0, 2): 20}) as fabric:
        for receiver in (1, 2):
            server = in_node(fabric, receiver, receive)
            address = (fabric.address(receiver), 9000)
            send = (
                "import socket, time\n"
                "for _ in range(200):\n"
                f"    try: s = socket.create_connection({address!r}); break\n"
                "    except OSError: time.sleep(0.05)\n"
                "s.sendall(bytes(2_000_000)); s.close()"
            )
            assert in_node(fabric, 0, send).wait(30) == 0
            rates.append(float(server.communicate(timeout=30)[0]))
    fast, slow = rates
    assert 50 < fast < 130 and 10 < slow < 30


def test_nothing_is_left_of_a_fabric_and_its_processes_end() -> None:
    before = ours(os.getpid())
    with Fabric(2) as fabric:
        sleeper = in_node(fabric, 1, "import time; print('up', flush=True); time.sleep(60)")
        assert sleeper.stdout is not None and sleeper.stdout.readline() == "up\n"
        assert len(ours(os.getpid())) == len(before) + 3
    assert sleeper.wait(10) == -9
    assert ours(os.getpid()) == before


def test_what_a_killed_test_left_behind_goes_with_the_next(tmp_path: Path) -> None:
    code = (
        f"import sys, time; sys.path.insert(0, {str(Path(netns.__file__).parents[1])!r})\n"
        "from harness.netns import Fabric\n"
        "with Fabric(2): print('up', flush=True); time.sleep(60)"
    )
    killed = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None and killed.stdout.readline() == "up\n"
    killed.kill()
    killed.wait(10)
    assert len(ours(killed.pid)) == 3
    began = time.monotonic()
    with Fabric(1):
        wait_until("the end of what was left", lambda: not ours(killed.pid), timeout_s=10)
    assert time.monotonic() - began < 30
