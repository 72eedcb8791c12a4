"""`trierarch doctor`: what is wrong with a configuration and with this machine, before anything is queued."""

import os
import shutil
import sys
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings, as for submit: model=llama_1b nodes=4"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For a script.")] = False,
) -> None:
    """Check settings and this machine before anything is queued. Ends with 0, 1 for warnings, 78 for errors."""
    from contract.errors import UserError
    from tools.doctor.asked import AUTO
    from tools.doctor.facts import Facts
    from tools.doctor.finding import exit_code
    from tools.doctor.run import examine, found, render, to_json

    asked, problem = list(overrides or []), None
    if AUTO in asked:
        from tools.cli_plan import with_plan

        try:
            asked = with_plan(asked)
        except UserError as error:  # without a layout, the rest can be looked at
            problem = error
    facts = Facts.collect(asked, os.environ)
    if problem is not None:
        facts.asked.refuse(problem)
    outcomes = examine(facts)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(to_json(outcomes) if as_json else render(outcomes, width), end="")
    raise typer.Exit(exit_code(found(outcomes)))
