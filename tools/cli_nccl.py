"""`trierarch nccl`: what a machine's network is like, and what of it is bad."""

from pathlib import Path
from typing import Annotated

import typer

from tools.cli_nccl_test import app as test_app

app = typer.Typer(
    no_args_is_help=True, help="Test the network: find what is slow, order the nodes, choose settings."
)
app.add_typer(test_app)


@app.command()
def analyse(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="measurement.npz of `trierarch nccl test`; output of nccl-tests, text or JSON; NCCL's dumps of its "
            "topology and graphs; logs with NCCL_DEBUG=INFO. In any mix.",
        ),
    ],
    baseline: Annotated[
        Path | None,
        typer.Option(help="An earlier measurement or nccl-tests' output of this machine, to compare with."),
    ] = None,
    topology: Annotated[
        Path | None,
        typer.Option(
            help="Which nodes are near each other: output of `scontrol show topology`, or a site's matrix of distances."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the report here: a page, pictures, files for the next job.")
    ] = None,
    operation: Annotated[
        str | None,
        typer.Option(help="What nccl-tests ran, for old outputs that do not say it: all_reduce, ..."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Say what is wrong with a machine's network from files that are there.

    Ends with 0 if nothing is, 1 if a part is slower than it should be, 2 if one does not work or gives wrong values.
    """
    import json

    from contract.errors import ConfigError
    from tools.nccl import report
    from tools.nccl.conclude import conclude, gravest
    from tools.nccl.findings import Findings
    from tools.nccl.parsers.any_file import gather, read_measurement
    from tools.nccl.report.files import verdict
    from tools.nccl.route.advice import Advice

    found = gather(files, operation)
    earlier = None if baseline is None else read_measurement(baseline, operation)
    measurement = found.measurement
    if found.is_test and measurement.ranks < 2 and not found.has_figures:
        raise ConfigError(
            f"{', '.join(map(str, files))}: nothing was measured, and between fewer than two ranks there is nothing "
            "to measure: give a test of two ranks or more"
        )
    if found.is_test:
        findings, advice = conclude(measurement, baseline=earlier, topology=topology)
    elif baseline is not None or topology is not None:
        option = "--topology" if baseline is None else "--baseline"
        raise ConfigError(
            f"{option} has nothing to be compared with: none of the files has figures, leave it out"
        )
    else:
        findings, advice = Findings(found.verdict, (), (), ()), Advice()
    findings = gravest(findings, found.verdict)
    evidence = report.Evidence(found.logs, found.topologies)
    content = report.contents(measurement, findings, advice, remarks=found.remarks, evidence=evidence)
    written = []
    if out is not None:
        written = report.write(out, measurement, findings, advice, remarks=found.remarks, evidence=evidence)
    if as_json:
        print(json.dumps(verdict(content), indent=1))
    else:
        print(report.text(content), end="")
        if written:
            print(f"\n{out}: {', '.join(path.name for path in written)}")
    raise typer.Exit(findings.verdict.exit_code)
