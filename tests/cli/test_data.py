"""`trierarch data`: from text to token files, and what is said on the way."""

import json
from pathlib import Path

import pytest
from harness.command import Trierarch
from transformers import PreTrainedTokenizerFast

from contract.exit_codes import ExitCode


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    path = tmp_path / "stories.jsonl"
    lines = [json.dumps({"text": f"The trireme number {index} rowed on. " * 5}) for index in range(50)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.req("A13")
def test_jsonl_with_a_tokenizer_of_its_own(trierarch: Trierarch, tmp_path: Path, stories: Path) -> None:
    made = trierarch(
        "data", "prepare", str(stories), "--prefix", "tokens/a", "--train-bpe", "300", "--workers", "2"
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("tokens/a: 50 documents, ")
    again = trierarch(
        "data", "prepare", str(stories), "--prefix", "tokens/a", "--train-bpe", "300", "--workers", "1"
    )
    assert "there was nothing to do" in again.stdout
    shown = trierarch("data", "info", "tokens/a")
    assert shown.returncode == 0
    assert "vocabulary 300" in shown.stdout

    # The tokenizer is a plain tokenizer.json: any other data can be made with it.
    tokenizer = tmp_path / "tokens/a.tokenizer.json"
    other = trierarch("data", "prepare", str(stories), "--prefix", "tokens/b", "--tokenizer", str(tokenizer))
    assert other.returncode == 0, other.stderr
    assert (tmp_path / "tokens/b.bin").read_bytes() == (tmp_path / "tokens/a.bin").read_bytes()
    assert PreTrainedTokenizerFast(tokenizer_file=str(tokenizer)).vocab_size == 300


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing.txt"], "nothing.txt"),
        (["stories.jsonl", "--json-key", "body"], "body"),
        (["stories.jsonl", "--tokenizer", "none.json"], "none.json"),
        (
            ["stories.jsonl", "--train-bpe", "300", "--tokenizer", "x.json"],
            "--train-bpe makes its own tokenizer",
        ),
        (["python-stdlib", "stories.jsonl"], "python-stdlib is a source of its own"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    trierarch: Trierarch, tmp_path: Path, stories: Path, arguments: list[str], sentence: str
) -> None:
    done = trierarch("data", "prepare", *arguments, "--prefix", "tokens/a")
    assert done.returncode == ExitCode.CONFIG
    said = [line for line in done.stderr.splitlines() if line.startswith("trierarch: ")]
    assert len(said) == 1, done.stderr
    assert sentence in said[0]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "tokens/a.idx").exists()
