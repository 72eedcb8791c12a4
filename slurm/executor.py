"""submitit's executors with our script as the text of the job.

submitit brings the job folder, the job handle and the local executor. Its pickled functions and its signal
handling stay out: the script starts the supervisor, which is the one owner of signals.
"""

import contextlib
import io
import os
import shlex
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from submitit import Job, LocalExecutor, SlurmExecutor
from submitit.core.utils import FailedJobError, FailedSubmissionError

from contract.errors import UserError
from slurm.client import clean_environment, one_sentence


class ScriptExecutor(SlurmExecutor):
    """Submits one finished script to Slurm."""

    def __init__(self, folder: Path, script: str, tasks: int, environ: Mapping[str, str]) -> None:
        """`folder` is submitit's own; `tasks` the number of ranks; `environ` the job's and sbatch's."""
        try:
            super().__init__(folder)
        except RuntimeError as error:
            raise UserError(
                f"Slurm's commands are not complete here ({error}): load the site's module"
            ) from None
        self.script = script
        self.tasks = tasks
        self.environ = clean_environment(environ)

    def submit_script(self) -> Job[Any]:
        """Call sbatch; raises UserError with what sbatch said if it refuses."""
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), _environment(self.environ):
                job: Job[Any] = self._submit_command("")
        except (FailedJobError, FailedSubmissionError) as error:
            raise UserError(f"sbatch refused the job: {_sentence(str(error) or said.getvalue())}") from error
        return job

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self.script

    def _num_tasks(self) -> int:
        return self.tasks


def submit_local(folder: Path, script: Path, environ: Mapping[str, str], limit_s: int, lead_s: int) -> int:
    """Start `script` by submitit's local executor and return the pid of its controller, which is the job's id.

    The controller asks for a stop `lead_s` before `limit_s` have passed, and ends the job then. It lives in a
    session of its own and holds no descriptor of ours: Ctrl-C, a closed terminal and a lost ssh don't reach it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the job can be stopped by it
            _close_terminal()
            with _environment(clean_environment(environ)):
                executor = LocalExecutor(folder)
                executor.update_parameters(timeout_min=limit_s / 60, signal_delay_s=lead_s)
                # The controller hides all GPUs from its tasks.
                command = shlex.join(["env", *_gpu_setting(environ), "bash", str(script)])
                job: Job[Any] = executor._submit_command(command)
            os.write(writer, job.job_id.encode())
        except BaseException as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    if not said.isdigit():
        raise UserError(f"the job could not be started on this machine: {_sentence(said)}")
    return int(said)


@contextlib.contextmanager
def _environment(environ: Mapping[str, str]) -> Iterator[None]:
    """Make `environ` this process's environment: submitit hands on nothing else."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _gpu_setting(environ: Mapping[str, str]) -> list[str]:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return ["-u", "CUDA_VISIBLE_DEVICES"] if visible is None else [f"CUDA_VISIBLE_DEVICES={visible}"]


def _close_terminal() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)


def _sentence(said: str) -> str:
    return one_sentence(said) or "it did not say why"
