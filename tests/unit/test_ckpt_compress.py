"""Steps stored compressed, as differences, and rounded: what is read is what was saved, and damage is named."""

import errno
import fcntl
import json
import os
import random
import re
import shutil
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
import zstandard
from harness.checkpoints import flat, load_dcp, save_dcp, seal, state
from harness.compressing import contents, hashes, killed_after, small_steps
from harness.disks import small_disk
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import SaveError, UserError
from tools.ckpt import compress as compressing
from tools.ckpt import guard
from tools.ckpt.chains import NotOursError, needs, steps_in
from tools.ckpt.compress import Compressor, Done, delta_run
from tools.ckpt.convert import Form, Wish, convert
from tools.ckpt.convert_read import DamagedSourceError
from tools.ckpt.diff import diff
from tools.ckpt.findings import Severity, UnreadableError
from tools.ckpt.guard import Check
from tools.ckpt.listing import steps_of
from tools.ckpt.lossy import write_rounded
from tools.ckpt.open import open_source
from tools.ckpt.report import Depth, Report
from tools.ckpt.steady import steadily
from tools.ckpt.validate import validate
from train.checkpoint.compress.container import Container
from train.checkpoint.compress.lock import locked_folder
from train.checkpoint.compress.rounding import Rounding
from train.checkpoint.compress.step import commit_compressed, compress_file, plain_names
from train.checkpoint.errors import DamagedError
from train.checkpoint.manifest import parse_manifest

LARGE = 300_000


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps, with one larger tensor of several blocks."""
    run = tmp_path_factory.mktemp("origin") / "run"
    small_steps(run, 6, LARGE)
    return run


@pytest.fixture(scope="module")
def chained(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a chain of differences."""
    run = Path(shutil.copytree(origin, tmp_path_factory.mktemp("chained") / "run"))
    delta_run(Compressor(), steps_in(run), 4, lambda one: None)
    return run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain of three steps of a few kB; who damages one mends it."""
    run = tmp_path_factory.mktemp("tiny") / "run"
    delta_run(Compressor(), small_steps(run, 3), 4, lambda one: None)
    return run


@pytest.fixture
def run(origin: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(origin, tmp_path / "run"))


@pytest.fixture
def chain(chained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(chained, tmp_path / "run"))


def step(run: Path, number: int) -> Path:
    return run / f"checkpoints/step_{number}"


def whole(folder: Path) -> Report:
    report = validate(folder, Depth.DEEP)
    assert report.exit_code == 0, report
    return report


def texts(report: Report) -> str:
    return "\n".join(map(str, report.errors)) or str(report.unreadable)


@pytest.mark.req("C9")
def test_a_step_is_compressed_in_place_and_comes_back_bit_for_bit(run: Path, origin: Path) -> None:
    folder, before = step(run, 10), step(origin, 10)
    done = Compressor().compress(folder)
    assert done.changed and done.after_bytes < 0.9 * done.before_bytes == 0.9 * done.plain_bytes
    assert not list(folder.glob("*.distcp"))
    assert {path.suffix for path in folder.glob("__0_*")} == {".z0"}
    report = whole(folder)
    assert not [one for one in report.findings if one.severity is not Severity.NOTE]
    assert not Compressor().compress(folder).changed

    assert diff(folder, before, deep=True).exit_code == 0
    plain = folder.with_name("plain")
    convert(folder, plain, Wish(Form.SAFETENSORS), None)  # type: ignore[arg-type]
    assert diff(plain, before).differing == []

    done = Compressor().restore(folder)
    assert done.changed and done.after_bytes == done.plain_bytes
    assert contents(folder) == contents(before)
    mine, other = (json.loads((one / "manifest.json").read_text()) for one in (folder, before))
    assert {**other, "xxh3": ""}.items() <= {**mine, "xxh3": ""}.items()
    assert not Compressor().restore(folder).changed
    tree = {
        "model": {"large": torch.zeros(LARGE)},
        "other": {"bfloat16": torch.zeros(300, dtype=torch.bfloat16)},
    }
    assert all(map(torch.equal, flat(load_dcp(folder, tree)).values(), flat(load_dcp(before, tree)).values()))


@pytest.mark.req("C9")
def test_any_member_of_a_chain_is_whole_and_restored(chain: Path, origin: Path, tmp_path: Path) -> None:
    steps = steps_in(chain)
    lengths = [len(needs(one, parse_manifest(one))) for one in steps]
    assert lengths == [0, 1, 2, 3, 4, 0]
    told = [one.stored for one in steps_of(chain)]
    assert told[0].startswith("compressed 0.8") and told[3].startswith("delta of step_30, 0.")
    assert [one.state for one in steps_of(chain)] == ["whole"] * 6
    sizes = [parse_manifest(one).bytes for one in steps]
    assert max(sizes[1:5]) < 0.6 * sizes[0]
    (tmp_path / "out").mkdir()
    for folder in random.sample(steps, 3):
        assert hashes(folder) == hashes(step(origin, int(folder.name[5:])))
        Compressor().restore_to(folder, tmp_path / "out" / folder.name)
        assert contents(tmp_path / "out" / folder.name) == contents(origin / "checkpoints" / folder.name)
    whole(tmp_path / "out" / folder.name)
    # In place, where others need what is restored.
    Compressor().restore(steps[2])
    whole(steps[4])
    assert contents(steps[2]) == contents(step(origin, 30))


def test_a_step_that_is_stored_anew_is_as_old_as_before(origin: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(origin, tmp_path / "run"))
    step = steps_in(run)[0]
    an_hour_ago = time.time() - 3600
    os.utime(step / ".metadata", (an_hour_ago, an_hour_ago))
    Compressor().compress(step)
    assert steps_of(run)[0].age_s > 3500


def test_a_step_goes_to_another_parent_and_to_none(chain: Path) -> None:
    before = hashes(step(chain, 40))
    done = Compressor().delta(step(chain, 40), step(chain, 10))
    assert done.changed and done.parent == "step_10"
    assert {path.suffix for path in step(chain, 40).glob("__0_*")} == {".z1"}
    whole(step(chain, 40))
    whole(step(chain, 50))
    assert not Compressor().delta(step(chain, 40), step(chain, 10)).changed
    assert Compressor().compress(step(chain, 40)).parent is None
    whole(step(chain, 50))
    # A newer one may be the parent, and a plain one.
    Compressor().restore(step(chain, 60))
    assert Compressor().delta(step(chain, 40), step(chain, 60)).parent == "step_60"
    whole(step(chain, 50))
    assert hashes(step(chain, 40)) == before


def test_a_run_is_chained_anew_whatever_its_steps_need(run: Path) -> None:
    Compressor().delta(step(run, 10), step(run, 60))
    found: list[Done] = []
    delta_run(Compressor(), steps_in(run), 2, found.append)
    assert [one.parent for one in found] == [None, "step_10", "step_20", None, "step_40", "step_50"]
    again: list[Done] = []
    delta_run(Compressor(), steps_in(run), 2, again.append)
    assert not any(one.changed for one in again)
    whole(step(run, 60))


def test_rings_and_long_chains_are_refused(chain: Path, origin: Path, tmp_path: Path) -> None:
    before = contents(chain)
    delta = partial(Compressor().delta, step(chain, 20))
    with pytest.raises(UserError, match=r"step_40 itself needs step_20: .*ckpt compress"):
        delta(step(chain, 40))
    with pytest.raises(UserError, match="difference to itself"):
        delta(step(chain, 20))
    with pytest.raises(UserError, match="not of one run"):
        delta(step(origin, 10))
    with pytest.raises(UserError, match=r"step_60 .* chain of 5 differences, more than --chain 4"):
        Compressor().delta(step(chain, 60), step(chain, 50))
    # Those that need it count too.
    with pytest.raises(UserError, match=r"step_10 .* chain of 5 differences"):
        Compressor().delta(step(chain, 10), step(chain, 60))
    shutil.copytree(step(chain, 60), step(chain, 70))
    with pytest.raises(UserError, match="holds step 60"):
        delta(step(chain, 70))
    shutil.rmtree(step(chain, 70))
    assert contents(chain) == before


@pytest.mark.req("C9")
def test_what_is_no_step_of_ours_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="does not exist"):
        steps_in(tmp_path / "nothing")
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    with pytest.raises(UnreadableError, match="no checkpoint yet"):
        steps_in(tmp_path / "empty")
    with pytest.raises(NotOursError, match="--to trierarch"):
        steps_in(save_dcp(tmp_path / "dcp", state()))
    manifest = json.loads((step(run, 10) / "manifest.json").read_text())
    seal(step(run, 10), manifest | {"format": 1})
    with pytest.raises(NotOursError, match=r"format 1, without hashes.*--to trierarch"):
        Compressor().compress(step(run, 10))


@pytest.mark.req("C9")
def test_a_damaged_step_is_not_stored_anew(run: Path) -> None:
    path = next(step(run, 20).glob("*.distcp"))
    flip(path, path.stat().st_size // 2)
    before = contents(run)
    for work in (
        lambda: Compressor().compress(step(run, 20)),
        lambda: Compressor().delta(step(run, 20), step(run, 10)),
        lambda: Compressor().delta(step(run, 30), step(run, 20)),
    ):
        with pytest.raises(DamagedSourceError, match=r"step_20 is damaged \(.*validate"):
            work()
    assert contents(run) == before


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def stored(folder: Path) -> Path:
    """The largest compressed file of a step."""
    return max(folder.glob("*.z*"), key=lambda path: path.stat().st_size)


def flip_block(run: Path) -> None:
    flip(stored(step(run, 30)), 5000)


def flip_index(run: Path) -> None:
    path = stored(step(run, 30))
    flip(path, path.stat().st_size - 60)


def cut(run: Path) -> None:
    path = stored(step(run, 30))
    os.truncate(path, path.stat().st_size - 100)


def longer(run: Path) -> None:
    with stored(step(run, 30)).open("ab") as file:
        file.write(b"x")


def gone(run: Path) -> None:
    stored(step(run, 30)).unlink()


def of_another_step(run: Path) -> None:
    path = stored(step(run, 30))
    shutil.copy(step(run, 40) / path.name, path)


def parent_gone(run: Path) -> None:
    shutil.rmtree(step(run, 10))


def parent_replaced(run: Path) -> None:
    """Another run's step under its name."""
    shutil.rmtree(step(run, 20))
    shutil.copytree(step(run, 60), step(run, 20))


def parent_damaged(run: Path) -> None:
    path = stored(step(run, 10))
    flip(path, path.stat().st_size // 2)


def parent_cut(run: Path) -> None:
    os.truncate(stored(step(run, 10)), 5000)


def ring(run: Path) -> None:
    manifest = json.loads((step(run, 10) / "manifest.json").read_text())
    identity = parse_manifest(step(run, 30)).identity
    seal(step(run, 10), manifest | {"parent": "step_30", "parent_identity": identity})


def manifest_names_another(run: Path) -> None:
    manifest = json.loads((step(run, 30) / "manifest.json").read_text())
    manifest["compressed"]["__0_0.distcp"]["file"] = "../step_40/__0_0.distcp.z0"
    seal(step(run, 30), manifest)


def manifest_flipped(run: Path) -> None:
    path = step(run, 30) / "manifest.json"
    path.write_text(path.read_text().replace('"parent": "step_20"', '"parent": "step_10"'))


FAULTS: list[tuple[Callable[[Path], None], str, bool]] = [
    (flip_block, r"does not have the hash .* \(file __0_\d.distcp.z0\)", False),
    (flip_index, r"its index is not what was written \(.*file __0_\d.distcp.z0", True),
    (cut, "does not end with an index", True),
    (longer, "does not end with an index", True),
    (gone, r"is missing \(.*file __0_\d.distcp.z0", True),
    (of_another_step, "file __0_", True),
    (parent_gone, "step_20, which it is the difference to: step_10, .*manifest.json is missing", True),
    (parent_replaced, "step_20 is not the step that it is the difference to", True),
    (
        parent_damaged,
        "as the difference to step_20, which it needs|step_10, which it is the difference to",
        False,
    ),
    (parent_cut, "step_20, which it is the difference to: .*instead of", True),
    (ring, "need each other", True),
    (manifest_names_another, "does not say how the step is stored", True),
    (manifest_flipped, "does not have the hash that it was saved with", True),
]


@pytest.mark.req("C9")
@pytest.mark.parametrize(("damage", "told", "quick"), FAULTS, ids=lambda one: getattr(one, "__name__", ""))
def test_damage_of_a_stored_step_is_found(
    chain: Path, damage: Callable[[Path], None], told: str, quick: bool
) -> None:
    damage(chain)
    report = validate(step(chain, 30))
    assert report.exit_code == 1
    assert re.search(told, texts(report)), texts(report)
    for depth in (Depth.QUICK, Depth.DEEP):
        report = validate(step(chain, 30), depth)
        assert report.exit_code == (1 if quick or depth is Depth.DEEP else 0), texts(report)
    listed = next(one for one in steps_of(chain) if one.name == "step_30")
    assert (listed.state == "damaged") == quick
    # Nobody makes it worse.
    before = contents(step(chain, 30))
    with pytest.raises(UserError):
        Compressor().compress(step(chain, 30))
    assert contents(step(chain, 30)) == before
    try:
        Compressor().restore(step(chain, 30))
    except UserError:
        assert contents(step(chain, 30)) == before
    else:
        whole(step(chain, 30))  # No byte of it was lost.


def test_leftovers_are_a_warning_and_go_with_the_next_command(chain: Path) -> None:
    folder = step(chain, 20)
    names = {"__0_0.distcp", "__0_1.distcp.z7", "manifest.json.tmp-9"}
    for name in names:
        (folder / name).write_bytes(b"half")
    report = whole(folder)
    assert {one.file for one in report.findings if one.severity is Severity.WARNING} == names
    Compressor().delta(folder, step(chain, 10))
    assert not whole(folder).errors and not names & {path.name for path in folder.iterdir()}


def test_what_a_command_at_work_makes_is_no_leftover(chain: Path) -> None:
    folder = step(chain, 20)
    (folder / "__0_1.distcp.z7").write_bytes(b"half")
    with locked_folder(folder):
        assert not [one for one in whole(folder).findings if one.severity is Severity.WARNING]
    assert [one.file for one in whole(folder).findings if one.severity is Severity.WARNING]


@pytest.mark.req("C9")
def test_a_step_without_those_that_it_needs_says_so_once(chain: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copytree(step(chain, 30), tmp_path / "alone/step_30"))
    told = "cannot be decoded.*step_20, which it is the difference to: manifest.json is missing"
    for depth in Depth:
        (found,) = validate(alone, depth).errors
        assert re.search(told, str(found))
    for a, b in ((alone, alone), (alone, step(chain, 30)), (step(chain, 30), alone)):
        with pytest.raises(UnreadableError, match=told) as failure:
            diff(a, b)
        assert failure.value.exit_code == 2
    for force in (False, True):
        with pytest.raises(UnreadableError, match=told):
            convert(alone, tmp_path / "new", Wish(Form.TORCH, force=force), None)  # type: ignore[arg-type]
    # Its own files are compared with their hashes still.
    flip(stored(alone), 5000)
    assert len(validate(alone).errors) == 2


def test_damage_of_a_parent_is_not_called_one_of_archives(chain: Path) -> None:
    for path in step(chain, 10).glob("*.z0"):
        data = path.read_bytes()
        path.write_bytes(data[:8] + bytes(len(data) // 2) + data[8 + len(data) // 2 :])
    report = validate(step(chain, 30))
    assert "which it is the difference to" in texts(report)
    assert "archive of torch.save" not in texts(report)


@pytest.mark.req("C9")
def test_a_step_that_is_stored_anew_all_the_time_is_never_called_damaged(
    origin: Path, chain: Path, tmp_path: Path
) -> None:
    """Compressed, made the difference to another one, and restored, beside whoever reads it, and one that needs it."""
    folder, ended = step(chain, 20), threading.Event()
    failures: list[Exception] = []
    rounds: list[bool] = []

    def loop() -> None:
        works = (
            lambda: Compressor().restore(folder),
            lambda: Compressor().delta(folder, step(chain, 60)),
            lambda: Compressor().compress(folder),
        )
        while not ended.is_set():
            for work in works:
                try:
                    rounds.append(work().changed)
                except Exception as error:
                    failures.append(error)
                ended.wait(0.05)

    other = Path(shutil.copytree(step(origin, 20), tmp_path / "step_20"))
    thread = threading.Thread(target=loop)
    thread.start()
    seen: list[object] = []
    deadline_s = time.monotonic() + 60
    try:
        while min(len(rounds) / 12, len(seen) / 30) < 1 and time.monotonic() < deadline_s and not failures:
            for one in (folder, step(chain, 30)):
                report = validate(one)
                told = [str(found) for found in report.findings if found.severity is not Severity.NOTE]
                seen.append(_calm(told, report.unreadable))
                seen.append(next(one.reason for one in steps_of(chain) if one.name == "step_20"))
            try:
                seen.append(diff(folder, other, deep=True).exit_code or "")
                target = tmp_path / f"new{len(seen)}"
                convert(folder, target, Wish(Form.TORCH), None)  # type: ignore[arg-type]
            except UnreadableError as error:
                seen.append(_calm([], str(error)))
    finally:
        ended.set()
        thread.join(60)
    assert not failures
    assert sum(rounds) >= 9
    assert set(seen) == {""}, set(seen)
    whole(folder)


def _calm(told: list[str], unreadable: str | None) -> str:
    """What was said but that the step never stayed as it was, which is true."""
    return (
        ""
        if unreadable and "stored anew each time" in unreadable
        else "; ".join([*told, unreadable or ""]).strip("; ")
    )


def test_a_step_that_never_stays_as_it_is(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []
    path = step(tiny, 10) / "manifest.json"

    def work() -> int:
        times.append(1)
        path.touch()
        return len(times)

    assert steadily([tiny, step(tiny, 20)], work) == 1
    # One that a step needs counts as well.
    with pytest.raises(UnreadableError, match=r"step_20 was stored anew each time that it was read, 5 times"):
        steadily([step(tiny, 20)], work, lambda found: True)
    assert len(times) == 6
    assert steadily([step(tiny, 20)], work, lambda found: found < 9) == 9
    with pytest.raises(ZeroDivisionError):
        steadily([step(tiny, 20)], lambda: 1 // 0)


@pytest.mark.req("C9")
@settings(max_examples=30)
@given(st.data())
def test_bytes_of_a_stored_file_do_not_change_unseen(tiny: Path, data: st.DataObject) -> None:
    file = next(step(tiny, 20).glob("__0_1*"))
    before = file.read_bytes()
    kind = data.draw(st.sampled_from(["flip", "cut", "zeros", "grown"]))
    at = data.draw(
        st.one_of(st.integers(0, len(before) - 1), st.integers(len(before) - 200, len(before) - 1))
    )
    changed = {
        "flip": before[:at] + bytes([before[at] ^ data.draw(st.integers(1, 255))]) + before[at + 1 :],
        "cut": before[:at],
        "zeros": before[:at] + bytes(64) + before[at + 64 :],
        "grown": before + before[at:],
    }[kind]
    file.write_bytes(changed)
    try:
        report = validate(step(tiny, 20))
        assert (report.exit_code != 0) == (changed != before)
        assert "\n" not in str(report.unreadable)
    finally:
        file.write_bytes(before)


NUMBERS = st.one_of(
    st.integers(-5, 5), st.sampled_from([1 << 20, 1 << 40, 1 << 62, 1 << 70, -(1 << 40)]), st.booleans()
)
STRANGE = st.one_of(NUMBERS, st.none(), st.text(max_size=3), st.floats(), st.lists(NUMBERS, max_size=3))


def reindexed(data: bytes, change: Callable[[dict[str, object]], None]) -> bytes:
    """A compressed file with another index, whose hash is right."""
    place, length, _, magic = struct.unpack("<QQ16s8s", data[-40:])
    told = json.loads(zstandard.ZstdDecompressor().decompress(data[place : place + length]))
    change(told)
    index = zstandard.ZstdCompressor().compress(json.dumps(told).encode())
    return (
        data[:place]
        + index
        + struct.pack("<QQ16s8s", place, len(index), xxhash.xxh3_128_digest(index), magic)
    )


@given(st.data())
def test_an_index_that_says_strange_things_is_refused(tiny: Path, data: st.DataObject) -> None:
    """Or read: but nothing crashes, and nothing takes memory that the file does not fill."""
    folder = step(tiny, 20)
    file = next(folder.glob("__0_1*"))
    before, manifest = file.read_bytes(), (folder / "manifest.json").read_bytes()

    def change(told: dict[str, object]) -> None:
        regions = told["regions"]
        assert isinstance(regions, list)
        number = data.draw(st.integers(0, len(regions) - 1))
        key = data.draw(st.sampled_from([*regions[number], "unknown", "nbytes of all", "regions"]))
        value = data.draw(STRANGE)
        if key == "regions":
            told["regions"] = value
        elif key == "nbytes of all":
            told["nbytes"] = value
        elif key == "lengths" and data.draw(st.booleans()):
            regions[number]["lengths"][0] = value
        else:
            regions[number][key] = value

    changed = reindexed(before, change)
    fields = json.loads(manifest)
    fields["compressed"]["__0_1.distcp"]["xxh3"] = xxhash.xxh3_128_hexdigest(changed)
    fields["files"][file.name] = len(changed)
    file.write_bytes(changed)
    seal(folder, fields)
    try:
        report = validate(folder)
        assert "\n" not in str(report.unreadable)
        with open_source(folder) as source:
            for entry in source.entries:
                source.locate(entry, entry.pieces[0]) if report.exit_code == 0 and entry.pieces else None
    finally:
        file.write_bytes(before)
        (folder / "manifest.json").write_bytes(manifest)


@given(
    st.sampled_from(["compressed", "parent", "parent_identity", "rounded", "files"]),
    STRANGE,
    st.integers(0, 2),
)
def test_a_manifest_that_says_strange_things_does_no_harm(
    tiny: Path, field: str, value: object, nested: int
) -> None:
    folder = step(tiny, 20)
    before = (folder / "manifest.json").read_bytes()
    told = [value, {"__0_0.distcp": value}, {"__0_0.distcp": {"file": value}}][nested]
    seal(folder, json.loads(before) | {field: told})
    try:
        reports = [validate(folder), validate(folder.with_name("step_30"), Depth.QUICK)]
        steps_of(folder.parents[1])
    finally:
        (folder / "manifest.json").write_bytes(before)
    assert not any("\n" in str(one.unreadable) for one in reports)


def test_an_index_cannot_take_all_memory(tmp_path: Path) -> None:
    def made(index: bytes) -> Path:
        path = tmp_path / "f.z0"
        data = b"TRIERZ01" + index
        digest = xxhash.xxh3_128_digest(index)
        path.write_bytes(data + struct.pack("<QQ16s8s", 8, len(index), digest, b"TRIERZ01"))
        return path

    bomb = zstandard.ZstdCompressor().compress(bytes(300 << 20))
    with pytest.raises(DamagedError, match="too large"):
        Container(made(bomb), None)
    region = {"begin": 0, "nbytes": 1 << 60, "itemsize": 1, "method": "plain", "parent_file": None}
    told = {"nbytes": 1 << 60, "regions": [region | {"parent_begin": 0, "lengths": []}]}
    with pytest.raises(DamagedError, match="cannot be"):
        Container(made(zstandard.ZstdCompressor().compress(json.dumps(told).encode())), None)


def test_a_block_of_many_frames_cannot_take_all_memory() -> None:
    from train.checkpoint.compress.methods import Method, decode

    frame = zstandard.ZstdCompressor().compress(bytes(4 << 20))
    data = (struct.pack("<I", len(frame)) + frame) * 1000
    with pytest.raises(DamagedError, match="larger than blocks are"):
        decode(data, 1, Method.PLAIN, None, np.empty(16, np.uint8))
    with pytest.raises(DamagedError, match="larger than blocks are"):
        decode(struct.pack("<I", 1 << 31) * 1000, 1, Method.PLAIN, None, np.empty(16, np.uint8))


def test_memory_stays_bounded_however_large_a_step_is(tmp_path: Path) -> None:
    import tracemalloc

    folder = small_steps(tmp_path / "run", 2, 3_000_000, files=1)[1]
    tracemalloc.start()
    try:
        Compressor().delta(folder, folder.with_name("step_10"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 25e6 < 0.7 * sum(entry.nbytes for entry in open_source(folder).entries)


@pytest.mark.req("C9")
def test_a_rounded_step_is_a_new_one_within_the_bound(run: Path, tmp_path: Path) -> None:
    before = contents(run)
    folder, out = step(run, 20), tmp_path / "out"
    out.mkdir()
    done = write_rounded(folder, out / "step_20", Rounding(False, 0.1), Compressor())
    assert contents(run) == before
    assert whole(out / "step_20").step == 20
    moments = {role: gain for role, gain in done.gains if role == "exp_avg"}
    assert {gain.method for gain in moments.values()} == {"rounded"}
    errors = parse_manifest(out / "step_20").rounded
    assert set(errors) == {"exp_avg", "exp_avg_sq"} and 0.001 < max(errors.values()) <= 0.1
    found = diff(folder, out / "step_20")
    groups = found.by_role()
    assert groups["weights"].differing == 0 and groups["exp_avg"].differing > 0
    for role, error in errors.items():
        assert groups[role].tally.relative_max <= error <= 0.1
    assert f"rounded: exp_avg by up to {errors['exp_avg']:.2%}" in head_of(found)

    # What it is made into says so too, with both errors.
    convert(out / "step_20", tmp_path / "step_20", Wish(Form.TRIERARCH), None)  # type: ignore[arg-type]
    assert parse_manifest(tmp_path / "step_20").rounded == errors
    (tmp_path / "all").mkdir()
    done = write_rounded(tmp_path / "step_20", tmp_path / "all/step_20", Rounding(True, 0.01), Compressor())
    again = parse_manifest(tmp_path / "all/step_20").rounded
    assert again["exp_avg"] >= errors["exp_avg"] and 0 < again["weights"] <= 2**-8
    found = diff(folder, tmp_path / "all/step_20")
    assert found.by_role()["exp_avg"].tally.relative_max <= again["exp_avg"]
    assert "weights by up to" in head_of(found)
    # It is a step like others.
    Compressor().restore(tmp_path / "all/step_20")
    whole(tmp_path / "all/step_20")


def test_errors_of_two_roundings_add_up(tiny: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(step(tiny, 10), tmp_path / "step_10"))
    (tmp_path / "out").mkdir()
    rounding = Rounding(False, 0.1)
    write_rounded(folder, tmp_path / "out/step_10", rounding, Compressor())
    once = parse_manifest(tmp_path / "out/step_10").rounded
    shutil.rmtree(tmp_path / "out/step_10")
    fields = json.loads((folder / "manifest.json").read_text())
    seal(folder, fields | {"rounded": {"exp_avg": 0.05, "weights": 0.01}})
    write_rounded(folder, tmp_path / "out/step_10", rounding, Compressor())
    twice = parse_manifest(tmp_path / "out/step_10").rounded
    assert twice["exp_avg"] == pytest.approx(1.05 * (1 + once["exp_avg"]) - 1)
    assert twice["weights"] == 0.01 and twice["exp_avg_sq"] == once["exp_avg_sq"]


def head_of(found: object) -> str:
    from tools.ckpt.diff_text import text

    return text(found, 5).splitlines()[0]  # type: ignore[arg-type]


def test_groups_of_rounding_begin_with_the_slice() -> None:
    from tools.ckpt.lossy import _groups

    parts = [np.arange(1000, dtype=np.uint8), np.arange(48, dtype=np.uint8)]
    found = [part.copy() for part in _groups(iter(parts), [500, 548], 4)]
    assert [part.nbytes for part in found] == [500, 548]
    assert (np.concatenate(found) == np.concatenate(parts)).all()


def test_one_command_at_a_time_works_on_a_step(run: Path) -> None:
    with locked_folder(step(run, 10)), pytest.raises(UserError, match="another command works on"):
        Compressor().compress(step(run, 10))
    with locked_folder(run / "checkpoints"), ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(guard, "COMMIT_WAIT_S", 0.1)
        before = contents(step(run, 10))
        with pytest.raises(UserError, match="removed or replaced by another process"):
            Compressor().compress(step(run, 10))
        assert contents(step(run, 10)) == before
    assert Compressor().compress(step(run, 10)).changed


def test_two_processes_do_not_write_to_one_file(run: Path) -> None:
    """A run may compress the same step by itself: one of the two commits, and the other has the step as it is then."""
    folder = step(run, 20)
    manifest = parse_manifest(folder)
    mine, other = (
        [compress_file(folder, manifest, name, {}, None) for name in plain_names(manifest)] for _ in range(2)
    )
    assert not {one.file for one in mine} & {one.file for one in other}
    commit_compressed(folder, manifest, other, None)
    with pytest.raises(FileNotFoundError):
        commit_compressed(folder, manifest, mine, None)
    whole(folder)


def test_the_first_failure_of_many_files_ends_the_others(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    failed = threading.Event()

    def one(folder: Path, manifest: object, name: str, places: object, parent: object, check: Check) -> None:
        if name == "__0_2.distcp":
            failed.set()
            raise OSError(28, "No space left on device")
        assert failed.wait(60)
        for _ in range(6000):
            time.sleep(0.01)
            try:
                check()
            except DamagedError:
                seen.append(name)
                raise

    monkeypatch.setattr(compressing, "compress_file", one)
    monkeypatch.setattr(guard, "_MOST_THREADS", 3)
    monkeypatch.setattr(guard.os, "sched_getaffinity", lambda _: range(3))
    with pytest.raises(SaveError, match="No space left on device"):
        Compressor().compress(step(run, 20))
    assert sorted(seen) == ["__0_0.distcp", "__0_1.distcp"]


def test_where_folders_have_no_locks_it_goes_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS wants to write to what it locks."""

    def refuse(number: int, *arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    for number in (errno.EBADF, errno.ENOLCK):
        monkeypatch.setattr(fcntl, "flock", partial(refuse, number))
        with locked_folder(tmp_path):
            pass
    monkeypatch.setattr(fcntl, "flock", partial(refuse, errno.EIO))
    with pytest.raises(OSError, match="Input/output"), locked_folder(tmp_path):
        pass


@pytest.mark.parametrize("change", ["removed", "replaced", "parent"])
def test_a_step_that_changes_meanwhile_stays_as_it_is(
    run: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a training does while a command works: it removes old steps."""
    folder, parent = step(run, 20), step(run, 10)
    real = compressing.compress_file
    once = threading.Lock()

    def meanwhile(*arguments: object) -> object:
        made = real(*arguments)  # type: ignore[arg-type]
        if once.acquire(blocking=False):
            if change == "removed":
                folder.rename(folder.with_name("step_20.removed"))
            elif change == "replaced":
                manifest = parse_manifest(folder)
                replace(manifest, samples_per_step=9).rewrite(folder)
            else:
                shutil.rmtree(parent)
        return made

    monkeypatch.setattr(compressing, "compress_file", meanwhile)
    before = contents(folder)
    with pytest.raises(UserError, match="step_"):
        Compressor().delta(folder, parent)
    folder = folder.with_name("step_20.removed") if change == "removed" else folder
    if change == "removed":
        before |= {name: data for name, data in contents(folder).items() if ".z" in name}
    assert contents(folder) == before
    whole(folder.rename(folder.with_name("step_20")) if change == "removed" else folder)


def test_a_full_disk_leaves_the_step_as_it_was(
    origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = parse_manifest(step(origin, 10)).bytes
    with small_disk(tmp_path / "disk", nbytes * 7 // 4 + (4 << 20)) as disk:
        folder = Path(shutil.copytree(step(origin, 10), disk / "checkpoints/step_10"))
        before = contents(folder)
        (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - nbytes // 2))
        with pytest.raises(SaveError, match=r"may need .* make room first"):
            Compressor().compress(folder)
        monkeypatch.setattr(compressing, "refuse_full", lambda *arguments: None)
        with pytest.raises(
            SaveError, match=r"could not be stored anew \(No space left on device\): it is as"
        ):
            Compressor().compress(folder)
        assert contents(folder) == before
        whole(folder)
        (disk / "filler").unlink()
        Compressor().compress(folder)
        (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - nbytes // 2))
        before = contents(folder)
        with pytest.raises(SaveError, match="No space left on device"):
            Compressor().restore(folder)
        assert contents(folder) == before
        whole(folder)


@pytest.mark.req("C9")
def test_a_killed_command_leaves_a_whole_step(run: Path, session_seed: int) -> None:
    """See tests/chaos for more of them."""
    chance = random.Random(session_seed)
    wanted = hashes(step(run, 20))
    for work in (
        lambda: Compressor().delta(step(run, 20), step(run, 10)),
        lambda: Compressor().compress(step(run, 20)),
        lambda: Compressor().restore(step(run, 20)),
    ):
        killed_after(chance.uniform(0.02, 0.4), work)
        whole(step(run, 20))
        work()
        assert hashes(step(run, 20)) == wanted
        assert not [one for one in whole(step(run, 20)).findings if one.severity is Severity.WARNING]


def test_reading_side_by_side(chain: Path) -> None:
    """Threads have files of their own."""
    with open_source(step(chain, 50)) as source, closing(source.twin()) as twin:
        entry = next(one for one in source.entries if one.name == "model.large")
        found: list[bytes] = []

        def read(own: object) -> None:
            found.append(b"".join(one.values.tobytes() for one in own.windows(entry)))  # type: ignore[attr-defined]

        threads = [threading.Thread(target=read, args=(own,)) for own in (source, twin)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found[0] == found[1] and len(found[0]) == 4 * LARGE
