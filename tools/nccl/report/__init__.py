"""What a person and a job are given: text, pictures, one page, settings. Imports no torch.

The files in a report's folder: report.txt, report.html, bandwidth.png, latency.png, inside.png, bandwidth.railN.png;
verdict.json, exclude.txt, hostfile, rankfile, plan.json, cluster.yaml.
"""

from collections.abc import Sequence
from pathlib import Path

from contract.errors import UserError
from contract.network_test import REPORT
from slurm.sites.profile import Profile
from tools.nccl.findings import Findings
from tools.nccl.measurement import Measurement
from tools.nccl.parsers.remark import Remark
from tools.nccl.report import files, html, png, settings
from tools.nccl.report.content import Content
from tools.nccl.report.settings import Evidence
from tools.nccl.report.text import text
from tools.nccl.route.advice import Advice

CLUSTER = "cluster.yaml"
PAGE = "report.html"


def contents(
    measurement: Measurement,
    findings: Findings,
    advice: Advice,
    *,
    remarks: Sequence[tuple[str, Remark]] = (),
    evidence: Evidence | None = None,
) -> Content:
    """Return what a report is made of.

    `remarks` are what files of NCCL's say, each with its file's name; `evidence` is what settings follow from.
    """
    chosen = settings.suggest(measurement, evidence or Evidence())
    return Content(measurement, findings, advice, tuple(remarks), tuple(chosen))


def write(
    folder: Path,
    measurement: Measurement,
    findings: Findings,
    advice: Advice,
    *,
    remarks: Sequence[tuple[str, Remark]] = (),
    evidence: Evidence | None = None,
    profile: Profile | None = None,
) -> list[Path]:
    """Write the whole report into `folder`, replacing an earlier one; return its files. Raises UserError.

    `remarks` and `evidence` are as for `contents`; `profile` is what settings are added to, without it the one that
    the measurement names, else that of any Slurm.
    """
    content = contents(measurement, findings, advice, remarks=remarks, evidence=evidence)
    source = f"{content.what}, {measurement.about.get('date', 'date unknown')}: {content.verdict}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("bandwidth*.png"), folder / "latency.png", folder / "inside.png"):
            old.unlink(missing_ok=True)
        written = files.write(folder, content)
        base = profile or settings.base_profile(measurement)
        cluster = settings.cluster_yaml(base, content.settings, source)
        (folder / CLUSTER).write_text(cluster, encoding="utf-8")
        (folder / REPORT).write_text(text(content), encoding="utf-8")
        pictures = png.write(folder, measurement, findings)
        html.write(folder / PAGE, content, pictures, cluster if content.settings else "")
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): give another folder") from error
    return [*written, folder / CLUSTER, folder / REPORT, *pictures, folder / PAGE]


__all__ = ["Content", "Evidence", "contents", "text", "write"]
