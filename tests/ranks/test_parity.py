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
    "parallel.micro_batch_size=4",
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
    (4, "zero=1 dp_replicate=2 micro_batch_size=2"),
    (4, "zero=2 dp_replicate=2 micro_batch_size=2"),
    (4, "zero=3 dp_replicate=2 micro_batch_size=2"),
]
TENSOR = [
    (2, "tp=2 micro_batch_size=8"),
    (2, "tp=2 sequence_parallel=false loss_parallel=false model.tie_embeddings=true micro_batch_size=16"),
    (2, "tp=2 data.mask_documents=true micro_batch_size=16"),
    (2, "tp=2 model.vocab_size=321 model.ffn_dim=65 micro_batch_size=16"),
    # More ranks than heads of keys and values.
    (4, "tp=4 micro_batch_size=16"),
    (4, "tp=2 zero=1 micro_batch_size=8"),
    (4, "tp=2 zero=3 sequence_parallel=false model.tie_embeddings=true"),
]
PIPELINE = [
    (2, "pp=2 schedule=gpipe"),
    (2, "pp=2 schedule=1f1b"),
    (2, "pp=2 schedule=looped_bfs"),
    (2, "pp=2 schedule=interleaved_1f1b"),
    (2, "pp=2 schedule=interleaved_zero_bubble"),
    (2, "pp=2 schedule=zbv"),
    (2, "pp=2 schedule=dualpipev"),
    (4, "pp=2 zero=0 micro_batch_size=2"),
    (4, "pp=2 zero=2 micro_batch_size=2"),
    (4, "pp=2 zero=3 schedule=interleaved_1f1b micro_batch_size=2"),
    (4, "pp=2 zero=2 schedule=zbv micro_batch_size=2"),
    (2, "pp=2 model.tie_embeddings=true schedule=zbv"),
    (4, "pp=2 zero=2 model.tie_embeddings=true micro_batch_size=2"),
]
CONTEXT = [
    (2, "cp=2 micro_batch_size=8"),
    (2, "cp=2 data.mask_documents=true micro_batch_size=8"),
    (2, "cp=2 context=ring micro_batch_size=8"),
    (4, "cp=4 context=ring zero=2 micro_batch_size=8"),
    (4, "cp=2 context=heads zero=0"),
    (4, "cp=2 context=ring zero=3 dp_replicate=2"),
]
COMPOSED = [
    (4, "tp=2 pp=2 micro_batch_size=8"),
    (4, "tp=2 cp=2 micro_batch_size=16"),
    (4, "pp=2 cp=2 data.mask_documents=true"),
    (4, "pp=2 cp=2 context=ring schedule=zbv"),
    (8, "pp=2 tp=2 zero=2 schedule=zbv"),
    (2, "pp=2 recompute=selective"),
    (4, "tp=2 zero=3 recompute=full micro_batch_size=8"),
    # One layer keeps less than the next, and the second stage more than the first.
    (2, "pp=2 recompute=auto recompute_budget_gb=0.0006 model.layers=4"),
]
LONG = [
    (4, "pp=4 model.layers=4"),
    (2, "tp=2 sequence_parallel=false micro_batch_size=8"),
    (2, "tp=2 loss_parallel=false micro_batch_size=8"),
    (2, "tp=2 model.tie_embeddings=true micro_batch_size=8"),
    (4, "tp=4 sequence_parallel=false micro_batch_size=8"),
    (4, "tp=2 zero=0"),
    (4, "tp=2 zero=2"),
    (4, "tp=2 zero=3"),
    (4, "tp=2 zero=3 model.vocab_size=321 model.ffn_dim=65"),
    (8, "tp=4 zero=2"),
    (8, "pp=2 tp=2 zero=3 schedule=interleaved_1f1b micro_batch_size=2"),
    (8, "tp=2 zero=3 dp_replicate=2 dp_shard=2 micro_batch_size=2"),
    (2, "pp=2 split=[3,1] model.layers=4"),
    (4, "pp=2 zero=1 micro_batch_size=2"),
    (4, "pp=2 zero=3 micro_batch_size=2"),
    (2, "pp=2 model.tie_embeddings=true"),
    (4, "cp=4 context=heads micro_batch_size=8"),
    (4, "cp=2 context=heads zero=1"),
    (4, "cp=2 context=ring zero=0"),
    (4, "cp=2 context=ring zero=3"),
    (4, "tp=2 cp=2 context=ring sequence_parallel=false micro_batch_size=8"),
    (8, "pp=2 tp=2 zero=0 micro_batch_size=2"),
    (8, "pp=2 tp=2 zero=1 model.tie_embeddings=true micro_batch_size=2"),
    (8, "pp=2 tp=2 zero=2 schedule=gpipe model.vocab_size=321 micro_batch_size=2"),
    (8, "pp=2 zero=2 dp_replicate=2 micro_batch_size=1"),
    (8, "pp=4 zero=1 micro_batch_size=1 model.layers=4"),
    (8, "tp=2 cp=2 zero=2 context=ring"),
    (8, "pp=2 cp=2 zero=3 context=ring micro_batch_size=2"),
    (8, "pp=2 tp=2 cp=2"),
    (8, "tp=2 cp=2 zero=3 micro_batch_size=8"),
    (8, "pp=2 tp=2 cp=2 context=ring schedule=dualpipev"),
    (4, "cp=2 zero=2 context=ring recompute=selective"),
    (8, "pp=2 tp=2 zero=2 recompute=full data.mask_documents=true micro_batch_size=2"),
    (16, "pp=2 tp=2 cp=2 dp_shard=2 zero=2 context=ring"),
]
"""More of the same, for `make chaos`."""


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


@pytest.mark.req("C5", "A1", "A2", "A3", "A4", "A9", "B1", "D2")
@pytest.mark.parametrize(
    ("size", "layout"),
    [
        *DATA,
        *(pytest.param(*layout, marks=pytest.mark.slow) for layout in TENSOR + PIPELINE + CONTEXT + COMPOSED),
        *(pytest.param(*layout, marks=pytest.mark.chaos) for layout in LONG),
    ],
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
