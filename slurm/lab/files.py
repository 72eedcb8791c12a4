"""The files a lab's daemons read and write: rendered from the templates, on free ports."""

import itertools
import os
import pwd
import random
import shutil
import socket
import time
import zlib
from pathlib import Path

import jinja2

from slurm.lab.folder import SETTINGS_FILE
from slurm.lab.host import FREEZER, has_freezer
from slurm.lab.settings import LabSettings

_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
# Below the kernel's range for outgoing connections (32768 and up), above well-known services.
_PORTS = range(15_000, 32_000)
_FOLDERS = ("run", "state", "spool", "tmp", "dev", "log")


def write(folder: Path, settings: LabSettings) -> None:
    """Replace whatever an earlier lab left in `folder` by the files of a new one."""
    for name in _FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    for node in settings.node_names:
        (folder / "tmp" / node).mkdir()
    for index in range(settings.gpus):
        (folder / "dev" / f"gpu{index}").touch()
    freezer = has_freezer()
    ports = free_ports(settings.nodes + 1)
    values = {
        "folder": folder,
        "settings": settings,
        "user": _user_name(),
        "host_name": socket.gethostname(),
        "controller_port": ports[0],
        "nodes": [
            {"name": name, "address": f"127.0.1.{index}", "port": port}
            for index, (name, port) in enumerate(zip(settings.node_names, ports[1:], strict=True), start=1)
        ],
        "freezer": FREEZER if freezer else None,
        "cgroup": cgroup_prefix(folder),
        # Half of Slurm's range and one id a second: no lab uses ids up faster, so none gives one out twice.
        "first_job_id": int(time.time()) % 30_000_000 + 1000,
    }
    for old in folder.glob("*.conf"):
        old.unlink()
    optional = {"gres.conf": settings.gpus > 0, "cgroup.conf": freezer}
    for name in ("slurm.conf", "hosts", "node.sh", *(name for name, wanted in optional.items() if wanted)):
        (folder / name).write_text(_TEMPLATES.get_template(f"{name}.j2").render(values))
    (folder / SETTINGS_FILE).write_text(settings.to_json())


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container may run as an id without a name, and Slurm takes the number too
        return str(os.geteuid())


def free_ports(count: int) -> list[int]:
    """Different TCP ports that nothing on this host listens on now, none of which an outgoing connection may take."""
    candidates = random.SystemRandom().sample(_PORTS, len(_PORTS))
    return list(itertools.islice(filter(_is_free, candidates), count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def cgroup_prefix(folder: Path) -> Path:
    """A node's freezer cgroup is this path, a dot and the node's name."""
    return FREEZER / f"trierarch-lab-{zlib.crc32(str(folder).encode()):08x}"


def remove_cgroups(folder: Path, timeout_s: float = 5.0) -> None:
    """Remove the nodes' empty cgroups; the kernel may call one busy for a moment after its last process."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = [
            path
            for top in FREEZER.glob(f"{cgroup_prefix(folder).name}.*")
            for path in [top, *top.rglob("*/")]
        ]
        for path in sorted(left, key=lambda path: len(path.parts), reverse=True):
            try:
                path.rmdir()
            except OSError:
                continue
        if not left or time.monotonic() > deadline:
            return
        time.sleep(0.02)
