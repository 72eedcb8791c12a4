"""One command for all ranks (srun, mpirun, or the trainer itself): run once, from its start to its end."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from contract.run_folder import RunFolder
from contract.variables import START
from slurm.supervise.judge import End, judge
from slurm.supervise.processes import start
from slurm.supervise.start import Start
from slurm.supervise.stop import StopRequest

# srun: `task 3: Exited with exit code 78`; mpirun: `Exit code: 78`.
_RANK_CODE = re.compile(rb"^(?:srun: error: .* Exited with exit code|\s+Exit code:)\s+(\d+)$")
_LOOK_EVERY_S = 1.0


class Step:
    """Runs the command; of the ranks it knows what the command says."""

    hears_preemption = False
    """Slurm tells the ranks alone, and they leave with 75 or die of it."""

    def __init__(
        self,
        run: RunFolder,
        command: Sequence[str],
        stop: StopRequest,
        *,
        stop_signal: signal.Signals,
        log: str | None,
        say: Callable[[str], None],
    ) -> None:
        """`log`: a file for the command's output, appended to; `say` tells the user."""
        self._run = run
        self._command = list(command)
        self._stop = stop
        self._stop_signal = stop_signal
        self._log = log
        self._say = say
        self._rank_codes: set[int] = set()

    def run(self, begin: Start, should_stop: Callable[[], bool]) -> End:
        """Run the command to its end; pass a stop request on to it, once."""
        before = begin.count_events()
        code = self._execute(begin, should_stop)
        return judge(code, begin.events_since(before), self._rank_codes)

    def idle(self, seconds: float) -> None:
        """Let time pass, at most until the next signal."""
        self._stop.wait(seconds)

    def close(self) -> None:
        """Nothing is left when the command has ended."""

    def _execute(self, begin: Start, should_stop: Callable[[], bool]) -> int:
        """Return the command's exit code, negative for a signal."""
        self._rank_codes = set()
        command = [begin.fill(word) for word in self._command]
        self._say("starting: " + " ".join(command))
        try:
            output = self._output(begin)
            environ = os.environ | {START: str(begin.number)}
            child = start(command, stdout=output, stderr=subprocess.PIPE, environ=environ)
        except OSError as error:
            self._say(f"cannot start {command[0]}: {error.strerror} ({error.filename})")
            return 127
        reader = threading.Thread(target=self._read_errors, args=(child.stderr, output), daemon=True)
        reader.start()
        forwarded = False
        while (code := child.poll()) is None:
            if not forwarded and should_stop():
                forwarded = True
                # Always the stop signal: srun and mpirun answer SIGTERM by killing the ranks at once.
                child.send_signal(self._stop_signal)
            self._stop.wait(_LOOK_EVERY_S)
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

    def _output(self, begin: Start) -> IO[bytes]:
        """Open the file for the command's output, unbuffered: the log, else this process's own output."""
        if self._log:
            return Path(begin.fill(self._log)).open("ab", buffering=0)
        return os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
