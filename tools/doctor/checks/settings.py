"""What the commands themselves would refuse, and say."""

from collections.abc import Iterator
from pathlib import Path

from tools.data_check import missing_data
from tools.doctor.asked import NOT_GIVEN
from tools.doctor.facts import Facts
from tools.doctor.finding import About, Finding, NotCheckedError, check, error, note, warning
from tools.doctor.host import Place


@check("settings", About.config)
def settings(facts: Facts) -> Iterator[Finding]:
    """Keys, values, layouts and limits that `trierarch submit` refuses."""
    yield from facts.asked.refused
    if facts.cluster.gpu is not None:
        from tools.plan.gpu import gpu

        gpu(facts.cluster.gpu)  # raises for one that there is not


@check("data", About.environment)
def data(facts: Facts) -> Iterator[Finding]:
    """The token files, as far as this host sees what the run's nodes see."""
    if Path(facts.config.data.prefix).name == NOT_GIVEN:
        raise NotCheckedError("data.prefix is not given")
    facts.need_here()
    say = error if facts.host.place is Place.ranks else warning
    for sentence in missing_data([facts.config.data.prefix]):
        yield say("data.prefix", sentence, "write them with `trierarch data prepare`, or correct data.prefix")


@check("variables of the shell", About.environment)
def variables(facts: Facts) -> Iterator[Finding]:
    """What sbatch's variables in the user's shell do."""
    for sentence in facts.settings.notes(facts.host.environ):
        yield note(sentence.partition("=")[0], sentence)
