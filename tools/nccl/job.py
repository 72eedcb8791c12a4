"""What the ranks of a network test run: measure, and on rank 0 write the report beside the measurement.

In the job itself, where numpy and matplotlib are: the supervisor may be outside of the container that has them.
"""

import os
import re
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from contract.errors import UserError
from contract.exit_codes import ExitCode
from contract.network_test import MEASUREMENT, TOPOLOGY, cannot_write
from contract.run_folder import RunFolder
from tools.nccl.measure.__main__ import main as measure
from tools.nccl.measure.__main__ import tell
from tools.nccl.measure.spec import Spec

if TYPE_CHECKING:
    from slurm.sites.profile import Profile

LOG = "nccl.log"
# Equal nodes differ in these.
_OF_ONE_HOST = re.compile(r'\s(?:host_hash|guid|version)="[^"]*"')


def main(arguments: list[str]) -> int:
    """Measure as one rank by the spec whose path is the only argument; return the exit code."""
    code = measure(arguments)
    if code != ExitCode.FINISHED or os.environ.get("RANK", "0") != "0":
        return code
    try:
        write_report(Spec.read(Path(arguments[0])))
    except UserError as error:
        tell(str(error))
        return error.exit_code
    except OSError as error:
        tell(cannot_write(Path(arguments[0]).parent, error))
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return ExitCode.FINISHED


def write_report(spec: Spec) -> None:
    """Analyse what was measured and write the report into the spec's folder; raises UserError."""
    from tools.nccl import report
    from tools.nccl.conclude import conclude_whatever, gravest
    from tools.nccl.parsers.any_file import gather, read_measurement

    folder = Path(spec.folder)
    found = gather([folder / MEASUREMENT])
    try:
        found = gather([folder / MEASUREMENT, *_told_by_nccl(folder)])
    except UserError as error:
        found.measurement.unmeasured.append(f"what NCCL has written down was not read: {error}")
    baseline = None if spec.baseline is None else read_measurement(Path(spec.baseline), None)
    profile = _profile(RunFolder(folder.parent))
    findings, advice = conclude_whatever(
        found.measurement, baseline=baseline, topology=_topology(folder, profile)
    )
    report.write(
        folder,
        found.measurement,
        gravest(findings, found.verdict),
        advice,
        remarks=found.remarks,
        evidence=report.Evidence(found.logs, found.topologies),
        profile=profile,
    )


def _told_by_nccl(folder: Path) -> list[Path]:
    """Return what NCCL has written down on the nodes: all logs as one, and each kind of node's topology once."""
    logs = sorted(folder.glob("nccl.*.log"))
    if logs:
        (folder / LOG).write_bytes(b"".join(log.read_bytes() for log in logs))
        for log in logs:
            log.unlink()
    kinds: dict[str, Path] = {}
    for file in sorted(folder.glob("topo.*.xml")):
        kind = _OF_ONE_HOST.sub("", file.read_text(errors="replace"))
        if kinds.setdefault(kind, file) != file:
            file.unlink()
    return [*kinds.values(), *([folder / LOG] if (folder / LOG).exists() else [])]


def _profile(run: RunFolder) -> "Profile | None":
    """Return the profile that the job was submitted with, None where it was not submitted."""
    import configs.compose
    from slurm.settings import SubmitConfig

    if not run.submit_settings.is_file():
        return None
    return configs.compose.load(run.submit_settings, SubmitConfig).cluster


def _topology(folder: Path, profile: "Profile | None") -> Path | None:
    """Return the file that says which nodes are near each other: the site's, else what Slurm said."""
    if profile is not None and profile.topology_file:
        return Path(os.path.expandvars(profile.topology_file)).expanduser()
    return folder / TOPOLOGY if (folder / TOPOLOGY).exists() else None
