"""What every test gets: a clean, printed seed, Hypothesis's settings, checked requirement ids."""

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest

_SEED_VARIABLE = "TRIERARCH_TEST_SEED"
_SEED = int(os.environ.get(_SEED_VARIABLE) or random.SystemRandom().randrange(2**31))
# Processes that share the tests between them (pytest -n) start from the same one.
os.environ[_SEED_VARIABLE] = str(_SEED)
_REQUIREMENTS = {
    f"{letter}{number}"
    for letter, count in {"C": 13, "A": 25, "B": 12, "D": 8}.items()
    for number in range(1, count + 1)
}

# A shell ignores Ctrl-C in what it runs in the background, and so would every program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile(
    "trierarch", max_examples=50, deadline=None, database=None, derandomize=False, print_blob=True
)
hypothesis.settings.load_profile("trierarch")


@pytest.fixture(scope="session")
def session_seed() -> int:
    """The seed that every test and every rank starts from."""
    return _SEED


@pytest.fixture(scope="session")
def toy_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of token files of made-up words, byte by byte: see `harness.toy`."""
    from harness.toy_text import write_toy_text

    from train.data.prepare import prepare

    folder = tmp_path_factory.mktemp("toy")
    prepare([write_toy_text(folder / "text")], folder / "toy", workers=1)
    return folder / "toy"


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """With `--dist loadgroup` give the tests that share something expensive to one process."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from harness.scheduling import TogetherScheduling

    return TogetherScheduling(config, log)


def pytest_report_header() -> str:
    """Say how to repeat the session's random numbers."""
    return f"seed: {_SEED} (repeat with {_SEED_VARIABLE}={_SEED})"


def pytest_runtest_setup() -> None:
    """Start each test from the same seed; a library that is not imported yet is not pulled in for it."""
    random.seed(_SEED)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(_SEED)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(_SEED)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a requirement mark that names no row of the ledger."""
    for item in items:
        for mark in item.iter_markers("req"):
            if not mark.args or not set(mark.args) <= _REQUIREMENTS:
                raise pytest.UsageError(
                    f"{item.nodeid}: req{mark.args} is not a list of ids C1-C13, A1-A25, B1-B12, D1-D8"
                )
