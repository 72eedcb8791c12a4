"""Text to tokens and back."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from contract.errors import ConfigError
from train.data.tokenizer import EOD_NAMES, JsonTokenizer, load_tokenizer, train_bpe

TEXTS = [
    "<| <| <| <|",
    "the quick brown fox",
    "der schnelle braune Fuchs, naïve café",
    "日本語のテキスト 🚀",
    "  \t\r\n x = y\n",
] * 5
texts = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def bpe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(TEXTS, 320, path)
    return path


def edited(source: Path, target: Path, **changes: object) -> Path:
    target.write_text(json.dumps(json.loads(source.read_text()) | changes))
    return target


@given(texts)
def test_bytes_give_the_text_back(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(np.append(ids, tokenizer.eod_id)) == text
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (257, 256)
    assert tokenizer.token_bytes().tolist() == [1] * 256 + [0]


def test_bpe_gives_any_text_back_and_counts_its_bytes(bpe_path: Path) -> None:
    tokenizer = load_tokenizer(str(bpe_path))
    token_bytes = tokenizer.token_bytes()
    assert token_bytes is not None
    assert token_bytes[tokenizer.eod_id] == 0
    assert token_bytes.max() > 1

    @given(texts)
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert token_bytes[ids].sum() == len(text.encode())
        assert ids.size == 0 or ids.max() < tokenizer.vocab_size

    check()


def test_training_is_repeatable(tmp_path: Path, bpe_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    train_bpe(iter(TEXTS), 320, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == bpe_path.read_bytes()
    assert (
        load_tokenizer(str(tmp_path / "again.json")).fingerprint == load_tokenizer(str(bpe_path)).fingerprint
    )


def test_a_vocabulary_smaller_than_the_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ask for 257 or more"):
        train_bpe(TEXTS, 256, tmp_path / "small.json")


def test_text_that_names_a_special_token_stays_text(bpe_path: Path) -> None:
    tokenizer = load_tokenizer(str(bpe_path))
    text = "a<|endoftext|>b"
    ids, (again,) = tokenizer.encode(text), tokenizer.encode_batch([text])
    assert tokenizer.eod_id not in ids
    assert ids.tolist() == again.tolist()
    library = tokenizers.Tokenizer.from_file(str(bpe_path))
    library.encode_special_tokens = True
    assert ids.tolist() == library.encode(text).ids
    assert tokenizer.decode(ids) == text


def test_an_added_token_named_as_end_is_not_matched_in_text(tmp_path: Path, bpe_path: Path) -> None:
    """A token that its file does not call special is matched in plain text until we say otherwise."""
    added = json.loads(bpe_path.read_text())["added_tokens"]
    added[0]["special"] = False
    tokenizer = load_tokenizer(str(edited(bpe_path, tmp_path / "t.json", added_tokens=added)))
    assert tokenizer.eod_id not in tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.token_bytes()[tokenizer.eod_id] == 0


def test_a_model_that_knows_the_end_as_a_piece_of_text_does_not_use_it(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("</s>", -0.1), *((character, -3.0) for character in "abc</s>")]
    unigram = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    unigram.save(str(tmp_path / "unigram.json"))
    tokenizer = load_tokenizer(str(tmp_path / "unigram.json"))
    ids = tokenizer.encode("a</s>b")
    assert tokenizer.eod_id == 1
    assert 1 not in ids
    assert "".join(pieces[index][0] for index in ids) == "a</s>b"
    assert tokenizer.token_bytes() is None


def test_unknown_text_may_become_the_special_token_for_it(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1, "</s>": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["[UNK]", "</s>"])
    words.save(str(tmp_path / "t.json"))
    assert load_tokenizer(str(tmp_path / "t.json")).encode("a z a").tolist() == [0, 1, 0]


def test_documents_are_neither_cut_nor_padded(tmp_path: Path, bpe_path: Path) -> None:
    limited = tokenizers.Tokenizer.from_file(str(bpe_path))
    limited.enable_truncation(4)
    limited.enable_padding(length=16)
    limited.save(str(tmp_path / "limited.json"))
    plain = load_tokenizer(str(bpe_path)).encode("the quick brown fox")
    assert (
        load_tokenizer(str(tmp_path / "limited.json")).encode("the quick brown fox").tolist()
        == plain.tolist()
    )


@pytest.mark.parametrize("name", EOD_NAMES)
def test_well_known_ends_are_found(tmp_path: Path, name: str) -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1, name: 7}, unk_token="[UNK]"))
    words.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(str(tmp_path / "t.json"))
    assert (tokenizer.eod, tokenizer.eod_id, tokenizer.vocab_size) == (name, 7, 8)


def test_the_end_can_be_named(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1, "STOP": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "t.json"))
    with pytest.raises(ConfigError, match="--eod"):
        load_tokenizer(str(tmp_path / "t.json"))
    with pytest.raises(ConfigError, match="--eod HALT"):
        load_tokenizer(str(tmp_path / "t.json"), eod="HALT")
    tokenizer = load_tokenizer(str(tmp_path / "t.json"), eod="STOP")
    assert tokenizer.eod_id == 2
    assert tokenizer.encode("a STOP a").tolist() == [0, 1, 1, 0]  # broken up, each half unknown


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Lowercase"}},
        {
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            }
        },
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
    ],
)
def test_bytes_of_a_lossy_tokenizer_are_not_claimed(
    tmp_path: Path, bpe_path: Path, changes: dict[str, object]
) -> None:
    assert JsonTokenizer(edited(bpe_path, tmp_path / "t.json", **changes)).token_bytes() is None


def test_bytes_are_known_behind_a_split(tmp_path: Path, bpe_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": r"\d{1,3}"}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps = {"type": "Sequence", "pretokenizers": [split, level]}
    tokenizer = load_tokenizer(str(edited(bpe_path, tmp_path / "t.json", pre_tokenizer=steps)))
    text = "in 12345 é days"
    assert tokenizer.token_bytes()[tokenizer.encode(text)].sum() == len(text.encode())


def test_bad_specs_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "not.json").write_text("{}")
    (tmp_path / "binary.json").write_bytes(b"\xff\x00")
    for spec in ("missing.json", "not.json", "binary.json", "."):
        with pytest.raises(ConfigError, match="tokenizer") as caught:
            load_tokenizer(str(tmp_path / spec))
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="leave --eod out"):
        load_tokenizer("bytes", eod="x")
