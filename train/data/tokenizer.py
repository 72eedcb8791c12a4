"""Text to tokens and back: plain bytes, or any Hugging Face `tokenizer.json`."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from contract.errors import ConfigError, UserError

TokenIds = npt.NDArray[np.int32]
EOD_NAMES = (
    "<|endoftext|>",
    "</s>",
    "<|end_of_text|>",
    "<eos>",
    "<|eot_id|>",
    "<|end▁of▁sentence|>",
    "[SEP]",
)
"""Names under which well-known tokenizers keep the token that ends a document, tried in this order."""


class Tokenizer(ABC):
    """Turns text into token ids (int32) and back.

    `vocab_size` is one above the largest id, `eod_id` the token that ends a document, `eod` its text (None
    where it has none), `fingerprint` tells tokenizers apart.
    """

    vocab_size: int
    eod_id: int
    eod: str | None
    fingerprint: str

    @abstractmethod
    def encode(self, text: str) -> TokenIds:
        """Return the tokens of a text, none of them special whatever the text says."""

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the tokens of each text."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """Return the text of tokens, special ones left out; broken UTF-8 becomes U+FFFD."""

    @abstractmethod
    def token_bytes(self) -> npt.NDArray[np.int64] | None:
        """Return how many bytes of text each token stands for (vocab_size), special ones 0.

        None when the tokenizer does not define it: only bytes and byte-level BPE do.
        """


class ByteTokenizer(Tokenizer):
    """A token for each byte of UTF-8, and one that ends a document."""

    vocab_size = 257
    eod_id = 256
    eod = None
    fingerprint = "bytes"

    def encode(self, text: str) -> TokenIds:
        """Return the UTF-8 bytes of a text."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """Return the text of the bytes."""
        array = np.asarray(ids, dtype=np.int64)
        return array[array < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """Return 1 for each byte, 0 for the end of a document."""
        counts = np.ones(self.vocab_size, dtype=np.int64)
        counts[self.eod_id] = 0
        return counts


class JsonTokenizer(Tokenizer):
    """A Hugging Face `tokenizer.json`, made safe for documents that contain its special tokens."""

    def __init__(self, path: Path, eod: str | None = None) -> None:
        self._tokenizer, self.fingerprint = _read(path)
        # Either of these would cut or lengthen every document silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod = _find_eod(path, vocabulary, eod)
        self.eod_id = vocabulary[self.eod]
        # One that is in the vocabulary as plain text only would be matched in documents.
        self._tokenizer.add_special_tokens([self.eod])
        self._description: dict[str, Any] = json.loads(self._tokenizer.to_str())
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token.content: index for index, token in added.items() if token.special}
        self._is_special = np.zeros(self.vocab_size, dtype=bool)
        self._is_special[list(self._special.values())] = True
        self._allow_unknown(vocabulary)

    def encode(self, text: str) -> TokenIds:
        """Return the tokens of a text, none of them special."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the tokens of each text, in as many threads as TOKENIZERS_PARALLELISM allows."""
        batch = [np.array(ids, dtype=np.int32) for ids in self._ids(texts)]
        return [
            self._encode_apart(text) if self._is_special[ids].any() else ids
            for text, ids in zip(texts, batch, strict=True)
        ]

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """Return the text of the tokens."""
        text: str = self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)
        return text

    def token_bytes(self) -> npt.NDArray[np.int64] | None:
        """Return the bytes of each token when this is lossless byte-level BPE, else None."""
        if not _is_lossless_byte_level(self._description):
            return None
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for token, index in self._tokenizer.get_vocab(with_added_tokens=False).items():
            counts[index] = len(token)
        for index, token in self._tokenizer.get_added_tokens_decoder().items():
            counts[index] = 0 if token.special else len(token.content.encode())
        return counts

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def _allow_unknown(self, vocabulary: dict[str, int]) -> None:
        """The token for unknown text is special, yet text may turn into it."""
        model = self._description["model"]
        unknown = model.get("unk_id", vocabulary.get(model.get("unk_token")))
        if unknown is not None and unknown != self.eod_id:
            self._is_special[unknown] = False

    def _encode_apart(self, text: str) -> TokenIds:
        """Encode a text whose model knows the special tokens as text: in pieces that break them up."""
        names = "|".join(re.escape(name) for name in sorted(self._special, key=len, reverse=True))
        cuts = [0, *(match.start() + 1 for match in re.finditer(names, text)), len(text)]
        pieces = [text[start:end] for start, end in pairwise(cuts)]
        ids = np.array([index for piece in self._ids(pieces) for index in piece], dtype=np.int32)
        if self._is_special[ids].any():
            raise UserError(
                f"the tokenizer turns plain text ({text[:40]!r}...) into its special tokens: use another tokenizer"
            )
        return ids


def load_tokenizer(spec: str, eod: str | None = None) -> Tokenizer:
    """Return the tokenizer `bytes`, or the one in the `tokenizer.json` at the path `spec`.

    `eod` names the token that ends a document; well-known names are tried without it. Raises `ConfigError`.
    """
    if spec != "bytes":
        return JsonTokenizer(Path(spec), eod)
    if eod is not None:
        raise ConfigError(f"--eod {eod}: the tokenizer `bytes` has its own end of document; leave --eod out")
    return ByteTokenizer()


def train_bpe(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE on texts and write it to `path` as a `tokenizer.json`.

    It is lossless (no normalisation, every byte in the vocabulary) and ends documents with <|endoftext|>. The
    same texts give the same file. Raises `ConfigError` for a vocabulary that cannot hold the bytes.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise ConfigError(
            f"a byte-level vocabulary of {vocab_size} is too small: ask for {len(alphabet) + 1} or more"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOD_NAMES[0]], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    aside = path.with_name(path.name + ".partial")
    aside.write_text(tokenizer.to_str(), encoding="utf-8")
    aside.replace(path)


def _read(path: Path) -> tuple[Any, str]:
    """Return the tokenizer in a file and the hash of the file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"tokenizer {path}: {error.strerror}; give `bytes` or the path of a tokenizer.json"
        ) from None
    try:
        tokenizer = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception for a file that it cannot parse
        raise ConfigError(
            f"tokenizer {path} is no Hugging Face tokenizer.json ({error}): give another"
        ) from None
    return tokenizer, hashlib.blake2b(data, digest_size=16).hexdigest()


def _find_eod(path: Path, vocabulary: dict[str, int], wanted: str | None) -> str:
    if wanted is not None and wanted not in vocabulary:
        raise ConfigError(f"--eod {wanted}: tokenizer {path} has no such token; name one that it has")
    found = [name for name in ((wanted,) if wanted is not None else EOD_NAMES) if name in vocabulary]
    if not found:
        raise ConfigError(
            f"tokenizer {path} has none of the usual tokens that end a document "
            f"({', '.join(EOD_NAMES)}): name its own with --eod"
        )
    return found[0]


def _is_lossless_byte_level(description: dict[str, Any]) -> bool:
    """Whether each token stands for exactly as many bytes as its name has characters."""
    steps = [description["pre_tokenizer"] or {}]
    if steps[0].get("type") == "Sequence":
        steps = steps[0]["pretokenizers"]
    model = description["model"]
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    return (
        model.get("type") == "BPE"
        and description["normalizer"] is None
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and set(pre_tokenizers.ByteLevel.alphabet()) <= set(model["vocab"])
        and bool(byte_level)
        and not any(step["add_prefix_space"] for step in byte_level)
        and all(step.get("type") in ("ByteLevel", "Split", "Digits") for step in steps)
        and not any(step.get("behavior") == "Removed" for step in steps)
        and not any(token["lstrip"] or token["rstrip"] for token in description["added_tokens"])
    )
