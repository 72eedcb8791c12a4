"""From text to token files: what is taken, what is refused, and that neither workers nor kills change it."""

import fcntl
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

import train.data.sources
from contract.errors import UserError
from train.data.indexed import IndexedTokens
from train.data.metadata import Metadata
from train.data.prepare import prepare
from train.data.shards import Skipped, _first_line_start, read_documents
from train.data.sources import STDLIB_EXCLUDED, Piece, cut_into_shards, find_files, python_stdlib


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut small sources into many shards."""
    monkeypatch.setattr(train.data.sources, "SMALLEST_SHARD_BYTES", 256)
    monkeypatch.setattr(train.data.sources, "LARGEST_SHARD_BYTES", 256)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    for index in range(30):
        path = source / f"sub{index % 3}" / f"{index:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"document {index} naïve 🚀\r\n" * (index + 1), encoding="utf-8", newline="")
    lines = [json.dumps({"text": f"line {index}\n", "id": index}) for index in range(40)]
    (source / "lines.jsonl").write_text("\n".join(lines) + "\n")
    return source


def texts(prefix: Path) -> list[str]:
    data, tokenizer = IndexedTokens(prefix), Metadata.read(prefix).load_tokenizer(prefix)
    offsets = data.document_offsets
    spans = [data[start:end] for start, end in pairwise(offsets)]
    assert all(span[-1] == tokenizer.eod_id and tokenizer.eod_id not in span[:-1] for span in spans)
    return [tokenizer.decode(span) for span in spans]


def published(prefix: Path) -> dict[str, bytes]:
    endings = (".bin", ".idx", ".json", ".tokenizer.json")
    paths = (prefix.parent / (prefix.name + ending) for ending in endings)
    return {path.name: path.read_bytes() for path in paths if path.exists()}


def jsonl(path: Path, *lines: Any) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def fails(sources: list[Path], prefix: Path, words: str, **options: Any) -> str:
    """Prepare in vain: one sentence, the code for a wrong configuration, nothing published or left over."""
    before = published(prefix)
    with pytest.raises(UserError, match=words) as caught:
        prepare(sources, prefix, **({"workers": 1} | options))
    assert caught.value.exit_code == 78
    assert "\n" not in str(caught.value)
    assert published(prefix) == before
    if prefix.parent.is_dir():
        assert not list(prefix.parent.glob("*.partial"))
        assert not list(prefix.parent.glob("*.lock"))
    return str(caught.value)


@pytest.mark.req("A13")
def test_a_folder_keeps_its_documents_whole_and_in_order(folder: Path, tmp_path: Path) -> None:
    report = prepare([folder], tmp_path / "out", workers=1)
    expected = [f"line {index}\n" for index in range(40)]
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.txt"))
    expected += [(folder / name).read_bytes().decode() for name in names]
    assert texts(tmp_path / "out") == expected
    metadata = report.metadata
    assert metadata == Metadata.read(tmp_path / "out")
    assert metadata.documents == 70
    assert metadata.text_bytes == sum(len(text.encode()) for text in expected)
    assert metadata.tokens == metadata.text_bytes + metadata.documents
    assert metadata.skipped == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.bin", "out.idx", "out.json", "source"]


def _record(progress: list[tuple[int, int]], done_bytes: int, total_bytes: int) -> None:
    progress.append((done_bytes, total_bytes))


@pytest.mark.req("A13")
@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("options", [{}, {"train_bpe": 300, "shuffle_seed": 5}])
def test_the_number_of_workers_changes_nothing(folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    results = []
    for workers in (1, 3):
        progress: list[tuple[int, int]] = []
        prefix = tmp_path / str(workers) / "out"
        record = partial(_record, progress)
        report = prepare([folder], prefix, workers=workers, on_progress=record, **options)
        assert report.shards > 20
        assert progress == sorted(progress)
        assert progress[0][0] == 0
        assert progress[-1][0] == progress[-1][1] == sum(p.stat().st_size for p in folder.rglob("*.*"))
        results.append(published(prefix))
    assert results[0] == results[1]


KILLED = """
import multiprocessing, os, signal, sys
from pathlib import Path
import train.data.sources
from train.data.prepare import prepare

def on_progress(done, total):
    if done:
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    train.data.sources.SMALLEST_SHARD_BYTES = train.data.sources.LARGEST_SHARD_BYTES = 256
    prepare([Path(sys.argv[1])], Path(sys.argv[2]), workers=2, on_progress=on_progress)
"""


def ends(pid: int) -> bool:
    """Whether a process that nobody may wait for (it is not our child) ends within ten seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.req("A13")
@pytest.mark.usefixtures("small_shards")
def test_a_killed_run_continues_to_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "killed" / "out"
    (tmp_path / "killed.py").write_text(KILLED)
    command = [sys.executable, str(tmp_path / "killed.py"), str(folder), str(prefix)]
    root = str(Path(train.data.sources.__file__).parents[2])
    killed = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    workers = [int(pid) for pid in killed.stdout.split()]
    assert len(workers) == 2
    assert all(ends(pid) for pid in workers)
    assert published(prefix) == {}
    finished = set(prefix.parent.glob("out.parts/*.npz"))
    report = prepare([folder], prefix, workers=1)
    assert 0 < report.reused == len(finished) < report.shards
    prepare([folder], tmp_path / "whole" / "out", workers=1)
    assert published(prefix) == published(tmp_path / "whole" / "out")
    assert not (prefix.parent / "out.parts").exists()


@pytest.mark.usefixtures("small_shards")
def test_a_failed_run_keeps_its_shards_and_redoes_what_changed(tmp_path: Path) -> None:
    for index in range(8):
        jsonl(tmp_path / f"s{index}.jsonl", {"text": f"{index}" * 243})  # fills a shard of 256 bytes
    bad = jsonl(tmp_path / "s8.jsonl", "nonsense\n")
    sources, prefix = sorted(tmp_path.glob("*.jsonl")), tmp_path / "out"
    fails(sources, prefix, "s8.jsonl line 1 is not JSON")
    jsonl(bad, {"text": "mended"})
    jsonl(tmp_path / "s3.jsonl", {"text": "x" * 243})
    report = prepare(sources, prefix, workers=1)
    assert (report.shards, report.reused) == (9, 7)
    assert texts(prefix)[3] == "x" * 243
    assert texts(prefix)[8] == "mended"


@pytest.mark.usefixtures("small_shards")
def test_a_damaged_shard_is_redone(tmp_path: Path) -> None:
    sources = [jsonl(tmp_path / f"s{index}.jsonl", {"text": f"{index} " * 150}) for index in range(3)]
    sources.append(jsonl(tmp_path / "bad.jsonl", "nonsense\n"))
    fails(sources, tmp_path / "out", "not JSON")
    jsonl(sources[3], {"text": "mended"})
    part = next((tmp_path / "out.parts").glob("*.npz"))
    content = bytearray(part.read_bytes())
    content[200] ^= 1
    part.write_bytes(content)
    fails(sources, tmp_path / "out", "was damaged and is removed: run the same command again")
    assert prepare(sources, tmp_path / "out", workers=1).reused == 3
    assert texts(tmp_path / "out")[0] == "0 " * 150


def test_nothing_is_done_twice_and_a_change_is_seen(folder: Path, tmp_path: Path) -> None:
    def again(**options: Any) -> bool:
        ran: list[int] = []
        report = prepare(
            [folder], tmp_path / "out", workers=1, on_progress=lambda *_: ran.append(1), **options
        )
        assert report.metadata == Metadata.read(tmp_path / "out")
        assert not (tmp_path / "out.parts").exists()
        return bool(ran)

    assert again()
    assert not again()
    os.utime(folder / "lines.jsonl", (1, 1))
    assert again()
    assert again(train_bpe=300)
    assert not again(train_bpe=300)
    (tmp_path / "out.bin").write_bytes(b"12")
    assert again(train_bpe=300)
    assert len(texts(tmp_path / "out")) == 70


def test_what_is_no_text_is_left_out_and_counted(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "latin1.txt").write_bytes("é".encode("latin-1"))
    (source / "utf16.txt").write_text("hello", encoding="utf-16")
    (source / "nul.txt").write_bytes(b"a\0b")
    (source / "empty.txt").write_bytes(b"")
    (source / "good.txt").write_bytes(b"\xef\xbb\xbfline\r\n")
    jsonl(source / "x.jsonl", {"text": ""}, '{"text": "half \\ud83d a pair"}\n', {"text": "whole"}, "\n  \n")
    report = prepare([source], tmp_path / "out", workers=1)
    assert report.metadata.skipped == {"not UTF-8": 2, "binary": 2, "empty": 2}
    assert len(report.metadata.skipped_examples) == 5
    assert texts(tmp_path / "out") == ["\ufeffline\r\n", "whole"]


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("ending", ["", "\n"])
def test_lines_longer_than_shards_are_read_once(tmp_path: Path, ending: str) -> None:
    expected = ["short", "x" * 5000, "", "é" * 100, "y" * 255, "z" * 2000]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"body": text}) for text in expected) + ending)
    report = prepare([path], tmp_path / "out", json_key="body", workers=1)
    assert report.shards > 25
    assert texts(tmp_path / "out") == [text for text in expected if text]
    assert report.metadata.skipped == {"empty": 1}


@given(st.lists(st.integers(0, 60), max_size=30), st.integers(1, 40), st.booleans())
def test_lines_cut_anywhere_are_all_read_once(lengths: list[int], size: int, ends_with_newline: bool) -> None:
    expected = [f"{index}:" + "x" * length for index, length in enumerate(lengths)]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.data.sources, "SMALLEST_SHARD_BYTES", size)
        patch.setattr(train.data.sources, "LARGEST_SHARD_BYTES", size)
        path = Path(folder) / "a.jsonl"
        path.write_text("\n".join(json.dumps({"t": text}) for text in expected) + "\n" * ends_with_newline)
        pieces = [piece for shard in cut_into_shards([path]) for piece in shard]
        assert [text for piece in pieces for text in read_documents(piece, "t", Skipped())] == expected


def test_a_piece_inside_a_huge_line_does_not_read_on() -> None:
    file = io.BytesIO(b"x" * 100_000)
    assert _first_line_start(file, Piece(Path("a.jsonl"), 100_000, 0, 1000, 2000)) == file.tell() == 2000


@pytest.mark.usefixtures("small_shards")
def test_compressed_lines_give_the_same_as_plain_ones(tmp_path: Path) -> None:
    plain = jsonl(tmp_path / "a.jsonl", *({"text": f"line {index} " * 10} for index in range(50)))
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    first = prepare([plain], tmp_path / "plain", workers=1)
    second = prepare([packed], tmp_path / "packed", workers=1)
    assert first.shards > second.shards == 1
    assert first.metadata.fingerprint == second.metadata.fingerprint


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{broken\n", "is not JSON"),
        ('{"other": "x"}\n', 'no text under the key "text"'),
        ('{"text": 5}\n', 'no text under the key "text"'),
        ('["text"]\n', 'no text under the key "text"'),
        ("[" * 100_000 + "\n", "is not JSON"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_wrong_line_is_named(tmp_path: Path, line: str, words: str, packed: bool) -> None:
    path = jsonl(tmp_path / "a.jsonl", *({"text": f"good {index}"} for index in range(60)), line)
    if packed:
        path = path.rename(tmp_path / "a.jsonl.gz")
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert f"{path} line 61 " in fails([path], tmp_path / "out", words)


def test_workers_hand_their_errors_on(folder: Path, tmp_path: Path) -> None:
    bad = jsonl(tmp_path / "bad.jsonl", *([{"text": "x" * 1000}] * 2000), "{broken\n")
    assert f"{bad} line 2001 " in fails([folder, bad], tmp_path / "out", "is not JSON", workers=2)


def test_sources_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "made" / "out"
    (tmp_path / "none").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.bin").write_bytes(b"\0")
    fails([tmp_path / "missing"], out, "neither a file nor a folder")
    fails([tmp_path / "none"], out, "no file matches")
    fails([], out, "nothing to prepare")
    fails([tmp_path / "empty.txt"], out, "1 empty")
    fails([tmp_path / "binary.bin"], out, "1 binary")
    fails([jsonl(tmp_path / "blank.jsonl", "\n")], out, "no lines")
    for glob in ("/absolute", ""):
        fails([tmp_path], out, "--glob", glob=glob)


def test_a_broken_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(b'{"text": "hello"}\n' * 1000)
    for data in (b"no archive", whole[:-20], whole[:30] + b"\xff\xff" + whole[32:]):
        path.write_bytes(data)
        assert str(path) in fails([path], tmp_path / "out", "broken gzip file")


def test_a_target_that_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fails([folder], tmp_path / "file" / "out", "cannot write .*file")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
@pytest.mark.parametrize("name", ["out.bin.partial", "out.idx.partial", "out.json.partial"])
def test_a_full_disk_publishes_nothing_and_loses_nothing(folder: Path, tmp_path: Path, name: str) -> None:
    prefix = tmp_path / "to" / "out"
    prepare([folder / "lines.jsonl"], prefix, workers=1)
    (prefix.parent / name).symlink_to("/dev/full")
    fails([folder], prefix, "No space left on device.*what is finished is kept")
    (prefix.parent / name).unlink(missing_ok=True)
    report = prepare([folder], prefix, workers=1)
    assert report.reused == report.shards
    assert len(texts(prefix)) == 70


def test_two_at_once_are_refused(folder: Path, tmp_path: Path) -> None:
    with (tmp_path / "out.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process prepares"):
            prepare([folder], tmp_path / "out", workers=1)


def test_a_file_that_grows_meanwhile_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": "hello"})

    def grow(done: int, total: int) -> None:
        with path.open("a") as file:
            file.write('{"text": "more"}\n')

    fails([path], tmp_path / "out", "changed while it was read", on_progress=grow)


def test_its_own_output_is_no_source(folder: Path) -> None:
    first = prepare([folder], folder / "out", workers=1).metadata
    (folder / "new.txt").write_text("new")
    second = prepare([folder], folder / "out", workers=1).metadata
    assert (second.documents, second.skipped) == (first.documents + 1, {})


def test_the_tokenizer_travels_with_the_data(folder: Path, tmp_path: Path) -> None:
    trained = tmp_path / "trained" / "out"
    prepare([folder], trained, train_bpe=300, workers=1)
    given = tmp_path / "given.json"
    given.write_bytes((tmp_path / "trained" / "out.tokenizer.json").read_bytes())
    metadata = prepare([folder], tmp_path / "out", str(given), workers=1).metadata
    given.unlink()
    assert metadata.tokenizer == "out.tokenizer.json"
    assert (metadata.vocab_size, metadata.eod, metadata.dtype) == (300, "<|endoftext|>", "uint16")
    assert metadata.fingerprint == Metadata.read(trained).fingerprint
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in tmp_path.glob("out.*"):
        path.rename(moved / path.name)
    assert texts(moved / "out") == texts(trained)


def test_another_tokenizer_under_the_same_name_is_noticed(tmp_path: Path) -> None:
    source, path = jsonl(tmp_path / "a.jsonl", {"text": "b"}), tmp_path / "t.json"
    for number in (3, 4):
        words = {"a": 0, "[UNK]": 1, "b": number, "</s>": 2}
        tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]")).save(str(path))
        prepare([source], tmp_path / "out", str(path), workers=1)
        assert IndexedTokens(tmp_path / "out")[:].tolist() == [number, 2]


def test_a_large_vocabulary_takes_wider_tokens(tmp_path: Path) -> None:
    words = {"a": 0, "[UNK]": 1, "b": 70_000, "</s>": 70_001}
    tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]")).save(str(tmp_path / "t.json"))
    source = jsonl(tmp_path / "a.jsonl", {"text": "b"})
    metadata = prepare([source], tmp_path / "out", str(tmp_path / "t.json"), workers=1).metadata
    assert metadata.dtype == "int32"
    assert IndexedTokens(tmp_path / "out")[:].tolist() == [70_000, 70_001]


@pytest.mark.parametrize("options", [{"tokenizer": "x.json"}, {"eod": "</s>"}])
def test_options_that_contradict_each_other_are_refused(
    folder: Path, tmp_path: Path, options: dict[str, str]
) -> None:
    fails([folder], tmp_path / "out", "--train-bpe", train_bpe=300, **options)


def test_no_workers_are_refused(folder: Path, tmp_path: Path) -> None:
    fails([folder], tmp_path / "out", "--workers 0", workers=0)


def test_a_shuffle_is_by_file_and_repeats(folder: Path, tmp_path: Path) -> None:
    def order(seed: int | None) -> list[str]:
        return [path.name for path in find_files([folder], "**/*.txt", (), seed, tmp_path / "out")]

    assert order(1) == order(1)
    assert sorted(order(1)) == sorted(order(None))
    assert len({tuple(order(seed)) for seed in (None, 1, 2)}) == 3
    before = order(1)
    (folder / "new.txt").write_text("new")
    assert [name for name in order(1) if name != "new.txt"] == before


def test_the_standard_library_is_enough_text_everywhere(tmp_path: Path) -> None:
    files = find_files([python_stdlib()], "**/*.py", STDLIB_EXCLUDED, 0, tmp_path / "out")
    assert 5e6 < sum(path.stat().st_size for path in files) < 30e6
    assert not [
        path for path in files if {"site-packages", "test"} & set(path.parts[len(python_stdlib().parts) :])
    ]
    assert any(path.name == "argparse.py" for path in files)


def test_preparing_imports_no_torch() -> None:
    code = "import sys, train.data.prepare, train.data.order; sys.exit('torch' in sys.modules)"
    root = str(Path(train.data.sources.__file__).parents[2])
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0


def test_metadata_that_is_broken_is_named(folder: Path, tmp_path: Path) -> None:
    prepare([folder], tmp_path / "out", workers=1)
    for content in ("", "{}", "[]", '{"unknown": 1}'):
        (tmp_path / "out.json").write_text(content)
        with pytest.raises(UserError, match=r"out\.json is not what"):
            Metadata.read(tmp_path / "out")
    (tmp_path / "out.json").unlink()
    with pytest.raises(UserError, match="does not exist"):
        Metadata.read(tmp_path / "out")


def test_tokens_of_bytes_are_the_bytes(tmp_path: Path) -> None:
    data = bytes(range(1, 128)) + "ÿ漢".encode()
    (tmp_path / "a.txt").write_bytes(data)
    prepare([tmp_path / "a.txt"], tmp_path / "out", workers=1)
    assert IndexedTokens(tmp_path / "out")[:-1].astype(np.uint8).tobytes() == data
