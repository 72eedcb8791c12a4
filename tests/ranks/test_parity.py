"""Every layout trains as one process does."""

from collections.abc import Callable
from pathlib import Path

import pytest
from harness.parity import Course, assert_same_course, bare_course, course_of
from harness.pool import Ranks
from harness.toy import toy_overrides, train_toy

from contract.exit_codes import ExitCode
from contract.run_folder import RunFolder

STEPS = 20
COMMON = [
    f"loop.steps={STEPS}",
    "loop.global_batch_size=16",
    "loop.eval_batches=1",
    "model.layers=4",
    "precision=fp32",
    "optim.decay=constant",
    # A gradient near zero is noise, which Adam with a tiny eps turns into whole steps.
    "optim.lr=3e-3",
    "optim.eps=1e-5",
]

DATA = [
    (1, ""),
    (2, "zero=0"),
    (2, "zero=1"),
    (2, "zero=2"),
    (2, "zero=3"),
    (3, "zero=3 micro_batch_size=1 dp=3 model.ffn_dim=72 loop.global_batch_size=12"),
    (4, "zero=1 dp_replicate=2"),
    (4, "zero=2 dp_replicate=2"),
    (4, "zero=3 dp_replicate=2"),
]
TENSOR: list[tuple[int, str]] = []
PIPELINE: list[tuple[int, str]] = []
CONTEXT: list[tuple[int, str]] = []
COMPOSED: list[tuple[int, str]] = []


def settings(layout: str) -> list[str]:
    """Overrides of a layout written briefly: names without a dot belong to `parallel`."""
    return [one if "." in one.split("=")[0] else f"parallel.{one}" for one in layout.split()]


@pytest.fixture(scope="session")
def bare(toy_tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], Course]:
    """The course of one process for a configuration; layouts of the same model and batch share it."""
    known: dict[tuple[str, ...], Course] = {}

    def course(more: list[str]) -> Course:
        key = tuple(sorted(one for one in more if not one.startswith("parallel.")))
        if key not in known:
            known[key] = bare_course(
                toy_overrides(toy_tokens, tmp_path_factory.mktemp("bare"), "bare", *COMMON, *key)
            )
        return known[key]

    return course


@pytest.mark.req("C5", "A1", "A9")
@pytest.mark.parametrize(
    ("size", "layout"),
    DATA + TENSOR + PIPELINE + CONTEXT + COMPOSED,
    ids=lambda value: str(value).replace(" ", ","),
)
def test_layout_trains_as_one_process(
    ranks: Ranks,
    toy_tokens: Path,
    tmp_path: Path,
    bare: Callable[[list[str]], Course],
    size: int,
    layout: str,
) -> None:
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *COMMON, *settings(layout))
    assert ranks(size, train_toy, overrides, timeout_s=120) == [ExitCode.FINISHED] * size
    assert_same_course(course_of(RunFolder(tmp_path / "run"), tmp_path), bare(settings(layout)))
