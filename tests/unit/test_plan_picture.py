"""The picture of a plan: what is drawn is what was given."""

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from contract.errors import UserError
from tools.plan.memory import Memory
from tools.plan.picture import COLOURS, draw, figure_of, rows_of, windows_of
from tools.plan.pipeline.simulate import Stage, Timeline, simulate
from tools.plan.step import Lane

pytestmark = pytest.mark.slow

GIB = 2**30
LANES = {"tp": Lane(0.18, 0.05, 1.0), "cp": Lane(0.0, 0.0, 0.0), "dp": Lane(0.04, 0.4, 2.0)}
SMALL = Memory(
    weights=12 * GIB,
    gradients=6 * GIB,
    optimizer=18 * GIB,
    activations=20 * GIB,
    buffers=3 * GIB,
    fragmentation=2 * GIB,
    context=1 * GIB,
)
LARGE = Memory(
    weights=24 * GIB,
    gradients=12 * GIB,
    optimizer=36 * GIB,
    activations=20 * GIB,
    buffers=3 * GIB,
    fragmentation=2 * GIB,
    context=1 * GIB,
)


def timeline(schedule: str = "1f1b", p: int = 4, v: int = 1, m: int = 8) -> Timeline:
    return simulate(schedule, p, [Stage(0.02, 0.021, 0.018)] * (p * v), m, 0.001, spans=True)


def axes_of(figure: Figure, title: str) -> Axes:
    return next(axes for axes in figure.axes if axes.get_title(loc="left").startswith(title))


def chunks_of(axes: Axes, row: int) -> list[tuple[float, float]]:
    """Start and end of each bar of a row."""
    found = []
    for collection in axes.collections:
        assert isinstance(collection, PolyCollection)
        for path in collection.get_paths():
            box = path.get_extents()
            if box.y0 < row < box.y1:
                found.append((box.x0, box.x1))
    return sorted(found)


@pytest.mark.req("A24")
@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_a_picture_is_written(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plan.{suffix}"
    draw(path, timeline(), LANES, {"tp 4": SMALL}, "a plan", capacity_gb=80)
    assert path.stat().st_size > 5000
    if suffix == "png":
        with Image.open(path) as image:
            assert image.format == "PNG" and image.width > 1000 and image.height > 500
            assert len(image.convert("RGB").getcolors(1 << 24) or []) > 20


@pytest.mark.req("A24")
@pytest.mark.parametrize(
    ("schedule", "v", "m"),
    [("1f1b", 1, 8), ("interleaved_1f1b", 2, 8), ("zb_2p", 1, 12), ("dualpipev", 2, 8)],
)
def test_bars_are_the_chunks(schedule: str, v: int, m: int) -> None:
    shown = timeline(schedule, v=v, m=m)
    unit = 1000 if shown.total_s < 1 else 1
    axes = axes_of(figure_of(shown, {}, {}, "a plan"), "A step")
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"rank {rank}" for rank in range(4)]
    for rank in range(4):
        spans = [span for span in shown.spans if span.rank == rank]
        expected = [(unit * span.start_s, unit * span.end_s) for span in spans]
        assert chunks_of(axes, rank) == [pytest.approx(one) for one in expected]
    if v == 1:
        drawn = {to_hex(colour) for one in axes.collections for colour in one.get_facecolor().tolist()}
        assert drawn == {COLOURS[span.kind] for span in shown.spans}
    assert axes.get_xlim() == pytest.approx((0, unit * shown.total_s))
    assert f"{100 * shown.bubble:.1f} %" in axes.get_title(loc="left")


@pytest.mark.req("A24")
def test_a_long_step_shows_its_first_and_its_last_part() -> None:
    shown = timeline("1f1b", p=24, m=300)
    panels = figure_of(shown, {}, {}, "a plan").axes
    first, last = windows_of(shown)
    assert first.start_s == 0 and last.end_s == shown.total_s and first.end_s < last.start_s
    assert [panel.get_xlim() for panel in panels] == [
        pytest.approx((window.start_s, window.end_s)) for window in (first, last)
    ]
    backward = min(span.end_s for span in shown.spans if span.rank == 0 and span.kind == "BW")
    assert first.end_s > backward
    ranks = [0, 3, 5, 8, 10, 13, 15, 18, 20, 23]
    assert rows_of(24) == ranks
    for panel, window in zip(panels, (first, last), strict=True):
        for row, rank in enumerate(ranks):
            spans = [
                span
                for span in shown.spans
                if span.rank == rank and span.end_s > window.start_s and span.start_s < window.end_s
            ]
            assert chunks_of(panel, row) == [pytest.approx((span.start_s, span.end_s)) for span in spans]


@pytest.mark.req("A24")
def test_lanes_are_what_is_waited_for_and_what_is_hidden() -> None:
    axes = axes_of(figure_of(timeline(), LANES, {}, "a plan"), "Communication")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["tp", "dp"]
    bars = [(bar.get_x(), bar.get_width(), bool(bar.get_hatch())) for bar in axes.patches]
    expected = [(0, 180, False), (180, 50, True), (0, 40, False), (40, 400, True)]
    assert bars == [pytest.approx(one) for one in expected]
    assert [text.get_text() for text in axes.texts] == ["180 ms of 230 ms", "40 ms of 440 ms"]


@pytest.mark.req("A24")
def test_memory_is_stacked_against_what_the_gpu_has() -> None:
    layouts = {"tp 8": SMALL, "tp 4": LARGE}
    axes = axes_of(figure_of(timeline(), {}, layouts, "a plan", capacity_gb=80), "Memory")
    assert [label.get_text() for label in axes.get_yticklabels()] == list(layouts)
    for row, memory in enumerate(layouts.values()):
        bars = [bar for bar in axes.patches if bar.get_y() < row < bar.get_y() + bar.get_height()]
        parts = [memory.weights, memory.gradients, memory.optimizer, memory.activations]
        parts += [memory.buffers, memory.fragmentation, memory.context]
        assert [bar.get_width() for bar in bars] == pytest.approx([part / GIB for part in parts])
        ends = [bar.get_x() + bar.get_width() for bar in bars]
        assert [bar.get_x() for bar in bars] == pytest.approx([0, *ends[:-1]])
        assert ends[-1] == pytest.approx(memory.total / GIB)
    (line,) = axes.lines
    assert list(line.get_xdata()) == [80, 80]
    assert [text.get_text() for text in axes.texts] == ["62.0", "98.0, does not fit", "the GPU has 80"]


def test_what_is_not_given_is_left_out() -> None:
    without = simulate("1f1b", 1, [Stage(1, 1, 1)], 4)
    assert not figure_of(without, {}, {}, "nothing").axes
    assert [axes.get_title(loc="left") for axes in figure_of(without, {}, {"one": SMALL}, "").axes] == [
        "Memory"
    ]
    assert figure_of(timeline(p=1), {}, {}, "one rank").axes


def test_pictures_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"plan.jpg: a picture is written to a file that ends in .png"):
        draw(tmp_path / "plan.jpg", timeline(), LANES, {}, "a plan")
    with pytest.raises(UserError, match=r"cannot be written .*give another file"):
        draw(tmp_path / "no/plan.png", timeline(), LANES, {}, "a plan")
