"""The lab is a real Slurm: several hosts, nodes that die, jobs that are pre-empted, and nothing left behind."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import contract
import slurm
from contract.errors import ConfigError, UserError
from slurm.lab import Lab, LabSettings, down, files, processes, status, up
from slurm.lab.files import cgroup_prefix
from slurm.lab.folder import locked
from slurm.lab.host import FREEZER
from slurm.sites import detect


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for a lab of the test's own: pytest's tmp_path is too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="lab-") as parent:
        folder = Path(parent) / "lab"
        try:
            yield folder
        finally:
            Lab(folder).down()


def holding(text: str) -> list[int]:
    """The processes of this host, a lab's namespaces included, with `text` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and text.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # it has ended
            continue
    return found


def wait_until(condition: Callable[[], object], timeout_s: float) -> object:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def test_job_spans_hosts_with_their_own_names_and_memory(lab):
    mine = f"test-{os.getpid()}"
    script = f"hostname; touch /dev/shm/{mine}; ls /dev/shm; getent hosts n1 | cut -d' ' -f1"
    lines = lab.run("srun", "-N2", "--nodelist=n1,n2", "sh", "-c", script).split()
    assert sorted(lines) == sorted(["n1", "n2", mine, mine, "127.0.1.1", "127.0.1.1"])
    assert not Path("/dev/shm", mine).exists()


def test_fake_gpus_are_shared_out(lab):
    shown = lab.run("srun", "-N1", "-n2", "--gpus-per-task=1", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert sorted(shown.split()) == ["0", "1"]
    assert lab.run("srun", "-N1", "--gres=gpu:2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES").strip() == "0,1"


def test_environment_forgets_the_job_that_it_is_used_in(lab, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    monkeypatch.setenv("SBATCH_PARTITION", "elsewhere")
    environment = lab.cluster.full_environment()
    assert {name for name in environment if name.startswith(("SLURM", "SBATCH"))} == {"SLURM_CONF"}


def test_preempted_job_is_requeued_and_a_power_cut_is_noticed(lab, tmp_path):
    """One test for both: they happen on different nodes, and their waits are most of this file's time."""
    low = lab.submit("sleep 300", "--nodelist=n3,n4", "--exclusive", "--requeue", folder=tmp_path)
    on_n2 = lab.submit("sleep 300", "--nodelist=n2", "--requeue", folder=tmp_path)
    lab.wait_for_state(low, {"RUNNING"})
    lab.wait_for_state(on_n2, {"RUNNING"})

    high = lab.submit("hostname", "--partition=high", "--nodelist=n3,n4", folder=tmp_path)
    lab.cluster.crash("n2")
    assert "n2" not in lab.cluster.running_nodes()

    lab.wait_for_state(high, {"COMPLETED"}, timeout_s=60)
    assert (tmp_path / f"{high}.out").read_text() == "n3\n"
    lab.wait_for_node("n2", {"down"}, timeout_s=60)
    assert lab.wait_for_state(on_n2, {"PENDING", "RUNNING"}) == "PENDING"

    lab.cluster.start("n2")
    for job in (low, on_n2):
        lab.wait_for_state(job, {"RUNNING"}, timeout_s=60)
        assert lab.job(job)["Restarts"] == "1"
    assert lab.run("srun", "--nodelist=n2", "hostname").strip() == "n2"


def test_frozen_node_keeps_its_tasks(lab, tmp_path):
    job = lab.submit("while echo beat; do sleep 0.1; done", "--nodelist=n1", folder=tmp_path)
    lab.wait_for_state(job, {"RUNNING"})
    output = tmp_path / f"{job}.out"
    assert wait_until(output.exists, 10.0)
    lab.cluster.freeze("n1")
    size = output.stat().st_size
    assert wait_until(lambda: output.stat().st_size > size, 10.0)
    with pytest.raises(UserError, match="srun"):
        lab.run("srun", "--nodelist=n1", "hostname", timeout_s=1.0)
    lab.cluster.thaw("n1")
    lab.run("scancel", job)
    assert lab.run("srun", "--nodelist=n1", "hostname").strip() == "n1"


def test_up_again_starts_only_what_is_missing(short_folder):
    settings = LabSettings(nodes=2)
    assert up(short_folder, settings).nodes == {"n1": "idle", "n2": "idle"}
    before = processes.daemons(short_folder)
    up(short_folder, settings)
    assert processes.daemons(short_folder) == before
    with pytest.raises(UserError, match="other settings"):
        up(short_folder, LabSettings(nodes=3))

    lab = Lab(short_folder)
    lab.stop("n2")
    assert lab.node_states()["n2"].startswith("down")
    assert up(short_folder, settings).nodes == {"n1": "idle", "n2": "idle"}
    after = processes.daemons(short_folder)
    assert {name for name in before if before[name] != after[name]} == {"n2"}


def test_down_leaves_no_process_and_tells_who_waits(short_folder):
    up(short_folder, LabSettings(nodes=2))
    lab = Lab(short_folder)
    task = f"TASK_OF={short_folder}"
    stubborn = f"#!/bin/bash\ntrap '' TERM\nenv {task} sleep 300 & env {task} setsid sleep 300 & wait\n"
    (short_folder / "job.sh").write_text(stubborn)
    lab.run("sbatch", "--output=/dev/null", str(short_folder / "job.sh"))
    waiting = subprocess.Popen(
        ["srun", "-N2", "env", task, "sleep", "300"],
        env=lab.full_environment(),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert wait_until(lambda: len(holding(task)) >= 4, 10.0)
        assert down(short_folder)
        assert not processes.find(short_folder)
        assert wait_until(lambda: not holding(task), 2.0)
        assert not list(FREEZER.glob(f"{cgroup_prefix(short_folder).name}.*"))
        assert waiting.wait(timeout=10) != 0
        assert not status(short_folder).is_up
        assert not down(short_folder)
    finally:
        if waiting.poll() is None:
            os.killpg(waiting.pid, signal.SIGKILL)
            waiting.wait()


def test_up_cleans_what_a_dead_controller_left(short_folder):
    settings = LabSettings(nodes=1)
    up(short_folder, settings)
    before = processes.daemons(short_folder)
    os.kill(before["slurmctld"], signal.SIGKILL)
    processes.wait_ended(short_folder, ["slurmctld"], timeout_s=5.0)
    assert not status(short_folder).is_up
    assert up(short_folder, settings).nodes == {"n1": "idle"}
    assert not set(before.values()) & {process.pid for process in processes.find(short_folder)}


def test_two_commands_at_once_share_one_lab(short_folder):
    with ThreadPoolExecutor() as pool:
        both = list(pool.map(lambda _: up(short_folder, LabSettings(nodes=1)).nodes, range(2)))
    assert both == [{"n1": "idle"}] * 2
    daemons = [p for p in processes.find(short_folder) if p.command == "slurmctld"]
    assert len(daemons) == 1


def test_munge_keeps_the_lab_to_who_has_its_key(short_folder):
    up(short_folder, LabSettings(nodes=1, auth="munge"))
    lab = Lab(short_folder)
    assert lab.run("srun", "hostname").strip() == "n1"
    config = (short_folder / "slurm.conf").read_text()
    (short_folder / "other.conf").write_text(config.replace("auth/munge", "auth/none"))
    refused = subprocess.run(
        ["squeue"],
        env=lab.full_environment() | {"SLURM_CONF": str(short_folder / "other.conf")},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode != 0
    assert down(short_folder)
    assert not processes.find(short_folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's place")
def test_works_without_root(short_folder):
    short_folder.parent.chmod(0o755)
    short_folder.mkdir(mode=0o700)
    # A copy, imported and used once as root: others may not be able to read the checkout or Python's library.
    copy = short_folder.with_name("copy")
    for package in (slurm, contract):
        shutil.copytree(Path(package.__path__[0]), copy / package.__name__)
    script = (
        "import os, pathlib, sys\n"
        "from slurm.lab import *; from slurm.lab import files\n"
        "os.mkdir('warm'); files.write(pathlib.Path('warm'), LabSettings())\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try:\n"
        "    up(folder, LabSettings(nodes=2))\n"
        "    print(Lab(folder).run('srun', '-N2', 'sh', '-c', 'hostname; id -u; grep CapEff /proc/self/status'))\n"
        "finally: down(folder)\n"
    )
    os.chown(short_folder, 65534, 65534)
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, str(short_folder)],
            cwd=copy,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.chown(short_folder, 0, 0)
    no_rights = ["0" * 16] * 2
    assert sorted(done.stdout.split()) == sorted(
        ["65534", "65534", "CapEff:", "CapEff:", "n1", "n2", *no_rights]
    ), done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's place")
def test_lab_of_someone_else_is_never_used(short_folder, monkeypatch):
    """His slurm.conf could name a plugin of his, which would run as the one who asks."""
    short_folder.mkdir(mode=0o700)
    stranger = subprocess.Popen(
        ["sleep", "60"],
        user=65534,
        env={"PATH": "/usr/bin:/bin", processes.MARK: f"{short_folder}:slurmctld"},
    )
    try:
        assert wait_until(lambda: holding(f"{short_folder}:slurmctld"), 5.0)
        assert not Lab(short_folder).is_up()
        assert processes.find(short_folder) == []
        os.chown(short_folder, 65534, 65534)
        for use in (Lab(short_folder).is_up, Lab(short_folder).status, lambda: Lab(short_folder).run("true")):
            with pytest.raises(UserError, match="someone else owns it"):
                use()
        monkeypatch.setattr("slurm.lab.folder.default_folder", lambda: short_folder)
        assert detect._default_lab() is None
    finally:
        os.chown(short_folder, 0, 0)
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("taken", [0, 1])
def test_port_that_somebody_took_meanwhile_is_replaced(short_folder, monkeypatch, taken):
    """The controller's or the node's."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        real, calls = files.free_ports, []

        def ports(count):
            calls.append(count)
            found = real(count)
            if len(calls) == 1:
                found[taken] = other.getsockname()[1]
            return found

        monkeypatch.setattr(files, "free_ports", ports)
        assert up(short_folder, LabSettings(nodes=1)).nodes == {"n1": "idle"}
    assert len(calls) == 2
    assert all(port < 32_768 for port in real(5))


def test_a_daemon_that_dies_is_named_with_its_words(short_folder):
    # Controller and node read the same file, and either may be the first to end over it.
    words = r"(slurmctld|n1) of the lab ended.*NoSuchOption.*log/\1\.out"
    with pytest.raises(UserError, match=words):
        up(short_folder, LabSettings(nodes=1, extra=("NoSuchOption=1",)))
    assert not processes.find(short_folder)


def test_missing_programs_are_named(short_folder, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"slurmctld, slurmd, srun.*apt-get install slurm-wlm"):
        up(short_folder)
    assert not short_folder.exists()


def test_folder_of_someone_else_is_refused(short_folder):
    short_folder.mkdir()
    short_folder.chmod(0o777)
    with pytest.raises(UserError, match="can write in it"):
        up(short_folder)
    short_folder.chmod(0o700)
    (short_folder / "thesis.tex").touch()
    with pytest.raises(UserError, match="other files"):
        up(short_folder)
    assert [entry.name for entry in short_folder.iterdir()] == ["thesis.tex"]
    link = short_folder.with_name("link")
    link.symlink_to(short_folder)
    with pytest.raises(UserError, match="is a link"):
        up(link)


@pytest.mark.parametrize(
    ("path", "said"), [("/tmp/" + "x" * 61, "66 characters"), ("/tmp/my lab", "cannot carry")]
)
def test_path_that_slurm_cannot_carry_is_refused(path, said):
    with pytest.raises(UserError, match=said):
        up(Path(path))
    assert not Path(path).exists()


def test_a_lock_that_is_held_is_waited_for_and_then_named(short_folder):
    short_folder.mkdir(mode=0o700)
    with locked(short_folder), pytest.raises(UserError, match="Another command"), locked(short_folder, 0.2):
        pass


@pytest.mark.parametrize(("name", "value"), [("nodes", 0), ("nodes", 251), ("auth", "nun"), ("grace_s", -1)])
def test_settings_that_make_no_lab_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        LabSettings(**{name: value})


def test_settings_survive_their_file():
    settings = LabSettings(nodes=3, auth="munge", extra=("A=1", "B=2"))
    assert LabSettings.from_json(settings.to_json()) == settings
