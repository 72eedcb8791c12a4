"""Inside the job: start the training, read how it ended, and restart it, requeue the job or give up.

    python -m slurm.supervise RUN [options] -- COMMAND...

One owner of every signal: the supervisor takes the job's signals and passes one stop request on. What
ends the ranks' step is read from its exit code and, where that says little, from the run's events: srun
reports 143 when ranks left with 75 too far apart, or with 78 while their peers still ran.
"""

import argparse
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import IO, Any

from contract.exit_codes import ExitCode
from contract.run_folder import Event, RunFolder, job_identity
from slurm.requeue import come_back, is_leaving, note

# srun and mpirun pass only these on to the ranks and do nothing else about them.
STOP_SIGNALS = ("SIGUSR1", "SIGUSR2")
_PR_SET_PDEATHSIG = 1
# srun: `task 3: Exited with exit code 78`; mpirun: `Exit code: 78`.
_RANK_CODE = re.compile(rb"^(?:srun: error: .* Exited with exit code|\s+Exit code:)\s+(\d+)$")
_LONGEST_BACKOFF_S = 60.0
# Requeues in a row that brought no new checkpoint; pre-emptions during the start are legitimate, so it is many.
_MAX_IDLE_REQUEUES = 10


class Verdict(StrEnum):
    """What the end of the training means."""

    finished = "finished"
    stopped = "stopped"
    crashed = "crashed"
    hopeless = "hopeless"


@dataclass(frozen=True)
class End:
    """How one start of the training ended."""

    verdict: Verdict
    code: int
    reason: str
    refused: bool = False
    """Whether the ranks were turned away because another process trains the run."""


def judge(code: int, events: Sequence[dict[str, Any]], rank_codes: Collection[int] = ()) -> End:
    """Read the end of a training from its exit code, the events since its start, and the ranks' own codes.

    The launcher's code alone says little: it is the largest of the ranks' codes, and 128 and more as soon as
    one rank was ended by the launcher because another one had left.
    """
    failures = [event for event in events if event.get("event") == Event.FAILED]
    failed = failures[-1] if failures else {}
    reason = str(failed.get("reason", ""))
    told = {event.get("event") for event in events}
    codes = {code, *rank_codes, failed.get("code")}
    if code == ExitCode.FINISHED:
        return End(Verdict.finished, code, reason)
    for hopeless in (ExitCode.CONFIG, ExitCode.NO_PROGRESS):
        if hopeless in codes:
            return End(Verdict.hopeless, hopeless, reason, refused=bool(failed.get("refused")))
    if Event.FINISHED in told:
        return End(Verdict.finished, ExitCode.FINISHED, reason)
    # All ranks save together before the first one leaves with 75.
    if ExitCode.STOPPED in codes or Event.STOPPED in told:
        return End(Verdict.stopped, ExitCode.STOPPED, reason)
    if ExitCode.PEER_FAILED in codes:
        return End(Verdict.crashed, ExitCode.PEER_FAILED, reason)
    return End(Verdict.crashed, 128 - code if code < 0 else code, reason)


class Supervisor:
    """Runs one command for one run folder until there is nothing left to do in this job."""

    def __init__(
        self,
        run: RunFolder,
        command: Sequence[str],
        *,
        max_restarts: int = 3,
        stop_signal: signal.Signals = signal.SIGUSR2,
        requeue: str = "never",
        log: str | None = None,
        backoff_s: float = 2.0,
    ) -> None:
        """`requeue` is `slurm`, `successor` or `never`; `log` a file for the command's output, appended to."""
        self.run = run
        self.command = list(command)
        self.max_restarts = max_restarts
        self.stop_signal = stop_signal
        self.requeue = requeue
        self.log = log
        self.backoff_s = backoff_s
        self.stop_requested = False
        self._child: subprocess.Popen[bytes] | None = None
        self._forwarded = False
        self._job, self._restart = job_identity()
        self._attempt = ""
        self._rank_codes: set[int] = set()
        self._starts = 0
        self._failures = 0
        self._step = -1

    def supervise(self) -> int:
        """Start the command, and again as often as it is worth it; return the job's exit code."""
        for number in {self.stop_signal, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}:
            signal.signal(number, self._on_signal)
        while True:
            before = len(self.run.read_events())
            self._step = self._newest_step()
            end = judge(self._start(), self.run.read_events()[before:], self._rank_codes)
            if end.verdict is Verdict.finished:
                return 0
            if end.refused:
                # Not ours to mark: whoever trains the run tells how it goes.
                self._say(end.reason)
                return end.code
            if end.verdict is Verdict.hopeless:
                return self._give_up(end.code, end.reason or "the training cannot go on")
            if end.verdict is Verdict.stopped or self.stop_requested:
                return self._leave(end)
            if self.requeue != "never" and is_leaving():
                return self._leave(end)
            if not self._may_restart():
                crashes = f"crashed {self._failures} times in a row without a new checkpoint"
                return self._give_up(end.code, f"{crashes}{f', last: {end.reason}' if end.reason else ''}")
            note(
                self.run,
                Event.RESTARTED,
                code=end.code,
                reason=end.reason,
                failures=self._failures,
                step=self._newest_step(),
            )
            self._pause()
            if self.stop_requested:
                return self._leave(end)

    def _start(self) -> int:
        """Run the command once; return its exit code, negative for a signal."""
        self._forwarded = False
        # Slurm's restarts, then those in this job: no log is ever written twice.
        self._attempt = f"{self._restart}-{self._starts}" if self._starts else str(self._restart)
        self._starts += 1
        self._rank_codes = set()
        command = [self._fill(word) for word in self.command]
        self._say("starting: " + " ".join(command))
        try:
            output = self._output()
            # A session of its own: a terminal's Ctrl-C and hang-up come from here, once.
            child = self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            self._say(f"cannot start {command[0]}: {error.strerror} ({error.filename})")
            return 127
        reader = threading.Thread(target=self._read_errors, args=(child.stderr, output), daemon=True)
        reader.start()
        if self.stop_requested:
            self._forward()
        code = child.wait()
        self._child = None
        # A process that got away may hold the pipe open.
        reader.join(timeout=5)
        self._say(f"ended with code {code}")
        return code

    def _read_errors(self, stream: IO[bytes], output: IO[bytes]) -> None:
        """Pass the launcher's messages on, and note the ranks' exit codes that it reports.

        Reads to the end whatever becomes of the output: a launcher that nobody reads blocks for ever.
        """
        for line in stream:
            self._rank_codes.update(int(match) for match in _RANK_CODE.findall(line.rstrip()))
            with suppress(OSError):  # the disk is full
                output.write(line)
        with suppress(OSError):
            output.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop_requested = True
        self._forward()

    def _forward(self) -> None:
        # Always the stop signal: srun and mpirun answer SIGTERM by killing the ranks at once.
        if self._child is not None and not self._forwarded:
            self._forwarded = True
            self._child.send_signal(self.stop_signal)

    def _may_restart(self) -> bool:
        """Count a crash: in a row are those between which no checkpoint was published."""
        if self._newest_step() > self._step:
            self._failures = 0
        self._failures += 1
        return self._failures <= self.max_restarts

    def _pause(self) -> None:
        deadline = time.monotonic() + min(_LONGEST_BACKOFF_S, self.backoff_s * 2 ** (self._failures - 1))
        while not self.stop_requested and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))

    def _leave(self, end: End) -> int:
        """End this job after a stop request; under Slurm see to it that the run comes back."""
        if end.verdict is Verdict.crashed:
            said = f"the training crashed (code {end.code}) while it was asked to stop"
            note(self.run, Event.WARNING, reason=said, step=self._newest_step())
        if self.requeue == "never":
            if end.verdict is Verdict.crashed and end.reason:
                return self._give_up(end.code, end.reason)
            if end.verdict is Verdict.crashed:
                # Asked before its ranks could listen: nothing was begun, nothing is lost.
                note(self.run, Event.STOPPED, step=self._newest_step())
            self._say("stopped on request; submit the run again to continue")
            return ExitCode.STOPPED
        if self._idle_requeues() >= _MAX_IDLE_REQUEUES:
            return self._give_up(
                ExitCode.NO_PROGRESS,
                f"requeued {_MAX_IDLE_REQUEUES} times without a new checkpoint: give the job more time",
            )
        trouble = come_back(self.run, self._newest_step(), by_slurm=self.requeue == "slurm", say=self._say)
        if trouble:
            return self._give_up(ExitCode.STOPPED, trouble)
        return ExitCode.STOPPED

    def _idle_requeues(self) -> int:
        """Count the requeues since the last submission that found the newest checkpoint where it is now."""
        jobs: set[tuple[Any, Any]] = set()
        newest = self._newest_step()
        for event in self.run.read_events():
            if event.get("event") == Event.SUBMITTED:
                jobs.clear()
            elif event.get("event") == Event.REQUEUED and event.get("step") == newest:
                jobs.add((event.get("job"), event.get("restart")))
        return len(jobs)

    def _give_up(self, code: int, reason: str) -> int:
        text = f"Exit code {code}: {reason.strip().rstrip('.')}; read {self._logs()}."
        with suppress(OSError):  # the disk is full
            self.run.mark_failed(text)
        note(self.run, Event.FAILED, code=code, reason=reason, by="supervisor", step=self._newest_step())
        self._say(text)
        return code

    def _logs(self) -> str:
        """Name the log of the last start."""
        name = f"{self._job}.r{self._attempt}"
        found = sorted(self.run.logs.glob(f"{name}.*log"))
        if len(found) == 1:
            return str(found[0])
        return str(self.run.logs / f"{name}.*.log") if found else f"the logs in {self.run.logs}"

    def _newest_step(self) -> int:
        return max(self.run.published_steps(), default=-1)

    def _output(self) -> IO[bytes]:
        """Open the file for the command's output, unbuffered: the log, else this process's own output."""
        if self.log:
            return Path(self._fill(self.log)).open("ab", buffering=0)
        return os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)

    def _fill(self, word: str) -> str:
        return word.replace("{job}", self._job).replace("{attempt}", self._attempt)

    def _say(self, text: str) -> None:
        with suppress(OSError):  # the disk is full; print would fail again when Python ends
            os.write(sys.stdout.fileno(), f"supervise: {text}\n".encode())


def _die_with_parent() -> None:
    """Have the kernel end the launcher with the supervisor, so that no rank outlives a killed job."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the supervisor."""
    parser = argparse.ArgumentParser(prog="python -m slurm.supervise", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument(
        "--max-restarts", type=int, default=3, help="crashes in a row without a new checkpoint"
    )
    parser.add_argument("--stop-signal", default="SIGUSR2", choices=STOP_SIGNALS)
    parser.add_argument("--requeue", default="never", choices=["slurm", "successor", "never"])
    parser.add_argument("--log", help="append the command's output here; {job} and {attempt} are filled in")
    parser.add_argument("--backoff-s", type=float, default=2.0, help="pause before the first restart")
    parser.add_argument("command", nargs="+", help="after --; {job} and {attempt} are filled in")
    given = parser.parse_args(arguments)
    supervisor = Supervisor(
        RunFolder(given.run.absolute()),
        given.command,
        max_restarts=given.max_restarts,
        stop_signal=signal.Signals[given.stop_signal],
        requeue=given.requeue,
        log=given.log,
        backoff_s=given.backoff_s,
    )
    return supervisor.supervise()


if __name__ == "__main__":
    sys.exit(main())
