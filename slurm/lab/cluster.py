"""A lab as an object: bring it up, take it down, and do to its nodes what happens to nodes."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from contract.errors import UserError
from slurm.client import CLUSTERS_VARIABLES, clean_environment
from slurm.lab import files, host, processes
from slurm.lab.folder import SETTINGS_FILE, check_owner, default_folder, locked, make_folder
from slurm.lab.settings import LabSettings

CONTROLLER = "slurmctld"
MUNGE = "munged"


@dataclass(frozen=True)
class LabStatus:
    """What a lab is doing: `nodes` has each node's state in Slurm's words, `jobs` squeue's lines."""

    folder: Path
    is_up: bool
    nodes: dict[str, str]
    jobs: list[str]


class Lab:
    """The Slurm cluster that lives, or may live, in one folder; several objects may stand for one lab."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or default_folder()).absolute()

    def environment(self) -> dict[str, str]:
        """The variables that point Slurm's commands, and what submits through them, at this lab."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def full_environment(self) -> dict[str, str]:
        """The calling process's environment for use on this lab: with no trace of another cluster or job."""
        kept = clean_environment(os.environ)
        for name in CLUSTERS_VARIABLES:
            kept.pop(name, None)
        return kept | {"PATH": host.search_path()} | self.environment()

    def run(self, *command: str, timeout_s: float = 30.0) -> str:
        """What one of Slurm's commands prints when it is run on this lab.

        Raises UserError if it fails, with what it said, or if it has not ended after `timeout_s`; also if the
        folder is another user's, whose slurm.conf could name plugins of his.
        """
        check_owner(self.folder)
        try:
            done = subprocess.run(
                command,
                env=self.full_environment(),
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UserError(
                f"`{' '.join(command)}` did not end in {timeout_s:.0f} s: see the logs in {self.folder}/log."
            ) from None
        if done.returncode != 0:
            said = " ".join((done.stderr or done.stdout).split())
            raise UserError(f"`{' '.join(command)}` failed on the lab in {self.folder}: {said}")
        return done.stdout

    def is_up(self) -> bool:
        """Whether the lab's controller lives; nodes that crashed do not make a lab one that is down.

        Raises UserError if the folder is another user's.
        """
        if not os.path.lexists(self.folder):
            return False
        check_owner(self.folder)
        return CONTROLLER in processes.daemons(self.folder)

    def settings(self) -> LabSettings:
        """What the lab was last brought up with."""
        return LabSettings.from_json((self.folder / SETTINGS_FILE).read_text())

    def up(self, settings: LabSettings | None = None) -> None:
        """Bring the lab up and wait until all its nodes are idle; start only what is missing if it is up.

        Raises UserError if this host cannot run a lab, if the one here runs with other settings, or if it
        does not come up, with the file that says why.
        """
        settings = settings or LabSettings()
        host.require_commands(settings.auth)
        namespaces = host.namespace_command()
        make_folder(self.folder)
        with locked(self.folder):
            if self.is_up():
                if settings != self.settings():
                    raise UserError(
                        f"The lab in {self.folder} is up with other settings: "
                        "take it down first, or give this one another folder."
                    )
                running = self.running_nodes()
                self._start_nodes([node for node in settings.node_names if node not in running], namespaces)
                return
            try:
                self._start_all(settings, namespaces)
            except UserError as error:
                if "in use" not in str(error):
                    raise
                self._start_all(settings, namespaces)  # somebody was quicker to take one of the ports

    def down(self) -> None:
        """End the lab's jobs, then its daemons; its logs stay. A lab that is not up is no error."""
        if not self.folder.exists():
            return
        check_owner(self.folder)
        with locked(self.folder):
            self._end()

    def status(self) -> LabStatus:
        """The state of the lab, its nodes and its unfinished jobs."""
        if not self.is_up():
            return LabStatus(self.folder, False, {}, [])
        jobs = self.run("squeue", "--noheader", "--format=%i %P %j %T %N %r").splitlines()
        return LabStatus(self.folder, True, self.node_states(), jobs)

    def node_states(self) -> dict[str, str]:
        """Each node's state in sinfo's words: `idle`, `down*` (a `*` means that it does not answer)."""
        lines = self.run("sinfo", "--noheader", "--Node", "--partition=low", "--format=%N %T").splitlines()
        return dict(line.split() for line in lines)

    def running_nodes(self) -> list[str]:
        """The nodes that are switched on, whatever the controller thinks of them."""
        living = processes.daemons(self.folder)
        return [node for node in self.settings().node_names if node in living]

    def crash(self, node: str) -> None:
        """Cut a node's power: all its processes die at once and the controller is not told."""
        processes.send([self._daemon(node)], signal.SIGKILL)
        processes.wait_ended(self.folder, [node], timeout_s=10.0)

    def start(self, node: str) -> None:
        """Switch on a node that crashed or was stopped, and wait until the controller knows."""
        if node in self.running_nodes():
            raise UserError(f"Node {node} of the lab in {self.folder} is running: crash or stop it first.")
        if node not in self.settings().node_names:
            raise self._no_such(node)
        self._start_nodes([node], host.namespace_command())

    def stop(self, node: str) -> None:
        """Switch a node off with the controller's knowledge: its jobs are dealt with at once."""
        self.crash(node)
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=stopped")

    def freeze(self, node: str) -> None:
        """Stop a node's slurmd from answering while its tasks run on, as when its network is cut."""
        self._signal_slurmd(node, signal.SIGSTOP)

    def thaw(self, node: str) -> None:
        """Undo `freeze`."""
        self._signal_slurmd(node, signal.SIGCONT)

    def _daemon(self, name: str) -> int:
        pid = processes.daemons(self.folder).get(name)
        if pid is None:
            raise self._no_such(name)
        return pid

    def _no_such(self, node: str) -> UserError:
        return UserError(
            f"The lab in {self.folder} has no running node {node!r}: see `sinfo` for what it has."
        )

    def _signal_slurmd(self, node: str, number: signal.Signals) -> None:
        self._daemon(node)
        found = processes.find(self.folder)
        processes.send([p.pid for p in found if p.daemon == node and p.command == "slurmd"], number)

    def _start_all(self, settings: LabSettings, namespaces: list[str]) -> None:
        self._end()
        files.write(self.folder, settings)
        try:
            self._start_controller(settings)
            self._start_nodes(settings.node_names, namespaces)
        except BaseException:
            self._end()
            raise

    def _start_controller(self, settings: LabSettings) -> None:
        environment = self.full_environment()
        if settings.auth == "munge":
            self._start_munge(environment)
        command = ["slurmctld", "-D", "-i", "-f", str(self.folder / "slurm.conf")]
        processes.spawn(command, self.folder, CONTROLLER, environment)

    def _start_munge(self, environment: dict[str, str]) -> None:
        run, log = self.folder / "run", self.folder / "log"
        key = run / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        # --force: the folder is closed to others, which munged, made for whole hosts, thinks a mistake.
        command = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={run}/munge.sock"]
        command += [
            f"--pid-file={run}/munged.pid",
            f"--seed-file={run}/munge.seed",
            f"--log-file={log}/munged.log",
        ]
        processes.spawn(command, self.folder, MUNGE, environment)
        deadline = time.monotonic() + 10.0
        while not (run / "munge.sock").exists():
            self._check_alive([MUNGE], deadline)
            time.sleep(0.02)

    def _start_nodes(self, nodes: list[str], namespaces: list[str]) -> None:
        started = datetime.now().replace(microsecond=0)
        for node in nodes:
            command = [*namespaces, "sh", str(self.folder / "node.sh"), node]
            processes.spawn(command, self.folder, node, self.full_environment())
        deadline = time.monotonic() + 30.0 + len(nodes)
        while nodes and not self._registered(nodes, started):
            self._check_alive([CONTROLLER, *nodes], deadline)
            time.sleep(0.05)

    def _registered(self, nodes: list[str], since: datetime) -> bool:
        """Whether each of `nodes` can take jobs and has reported to the controller at or after `since`."""
        try:
            lines = self.run("scontrol", "--oneliner", "show", "nodes", ",".join(nodes)).splitlines()
        except UserError:  # the controller is not listening yet
            return False
        reports = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]
        return all(_is_ready(report, since) for report in reports)

    def _check_alive(self, names: list[str], deadline: float) -> None:
        """Raise UserError if one of the daemons has ended or the time is over."""
        living = processes.daemons(self.folder)
        dead = [name for name in names if name not in living]
        if dead:
            raise UserError(f"{dead[0]} of the lab ended at once ({self._last_words(dead[0])}).")
        if time.monotonic() > deadline:
            raise UserError(
                f"The lab in {self.folder} did not come up in time: see the files in {self.folder}/log."
            )

    def _last_words(self, daemon: str) -> str:
        output = self.folder / "log" / f"{daemon}.out"
        lines = output.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        return f"{'; '.join(lines[-3:]).rstrip('.')}; more in {output}"

    def _end(self) -> None:
        """End jobs, nodes, then the controller; remove what only living daemons need."""
        living = processes.daemons(self.folder)
        if CONTROLLER in living:
            self._end_jobs()
        nodes = [name for name in living if name not in (CONTROLLER, MUNGE)]
        self._end_daemons(nodes, signal.SIGKILL)
        self._end_daemons([CONTROLLER], signal.SIGTERM)
        self._end_daemons([MUNGE], signal.SIGTERM)
        files.remove_cgroups(self.folder)

    def _end_jobs(self) -> None:
        """End jobs through Slurm, so that an `srun` waiting for one hears of it; the rest die with their nodes."""
        try:
            deadline = time.monotonic() + 2.0
            while jobs := self.run("squeue", "--noheader", "--format=%A", timeout_s=5.0).split():
                if time.monotonic() > deadline:
                    return
                self.run("scancel", "--quiet", *jobs, timeout_s=5.0)
                time.sleep(0.1)
        except UserError:  # a controller that does not answer cannot keep the lab from ending
            return

    def _end_daemons(self, names: list[str], number: signal.Signals) -> None:
        living = processes.daemons(self.folder)
        processes.send([living[name] for name in names if name in living], number)
        stubborn = processes.wait_ended(self.folder, names, timeout_s=5.0)
        processes.send([p.pid for p in processes.find(self.folder) if p.daemon in stubborn], signal.SIGKILL)
        processes.wait_ended(self.folder, stubborn, timeout_s=5.0)


def _is_ready(report: dict[str, str], since: datetime) -> bool:
    started = report.get("SlurmdStartTime", "None")
    if started in ("None", "Unknown") or datetime.fromisoformat(started) < since:
        return False
    # `IDLE+NOT_RESPONDING`, `DOWN*`: words and marks that say it takes no jobs.
    return not any(word in report["State"] for word in ("DOWN", "UNKNOWN", "NOT_RESPONDING", "*"))


def up(folder: Path | None = None, settings: LabSettings | None = None) -> LabStatus:
    """Bring up the lab in `folder` (default: the user's own) and say what it is doing; see `Lab.up`."""
    lab = Lab(folder)
    lab.up(settings)
    return lab.status()


def down(folder: Path | None = None) -> bool:
    """Take down the lab in `folder` (default: the user's own); returns whether it was up. See `Lab.down`."""
    lab = Lab(folder)
    was_up = lab.is_up()
    lab.down()
    return was_up


def status(folder: Path | None = None) -> LabStatus:
    """What the lab in `folder` (default: the user's own) is doing, whether it is up or not."""
    return Lab(folder).status()
