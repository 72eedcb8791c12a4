"""`<prefix>.json`: what token files were made of, and their fingerprint."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contract.errors import ConfigError, UserError
from train.data.indexed import with_ending
from train.data.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Metadata:
    """Facts of a pair of token files."""

    tokenizer: str
    """`bytes`, or the file name of the tokenizer, beside the token files."""
    tokenizer_fingerprint: str
    vocab_size: int
    eod: str | None
    """Text of the token that ends a document; null for `bytes`."""
    eod_id: int
    documents: int
    tokens: int
    text_bytes: int
    """UTF-8 bytes of all documents, the end-of-document tokens not counted."""
    dtype: str
    fingerprint: str
    """Of the content, as `IndexedWriter.finish` defines it."""
    recipe: str
    """Of the sources and options that it was made from: the same recipe need not be cooked again."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of documents left out, by reason."""
    skipped_examples: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """Return the text of the file."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def read(cls, prefix: Path) -> "Metadata":
        """Read `<prefix>.json`. Raises `UserError` when it is missing or broken."""
        path = with_ending(prefix, ".json")
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise UserError(
                f"{path} does not exist: make it with `trierarch data prepare`, or correct data.prefix"
            ) from None
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}): check its rights") from None
        except (ValueError, TypeError):
            raise UserError(
                f"{path} is not what `trierarch data prepare` writes: make it anew with that command"
            ) from None

    def load_tokenizer(self, prefix: Path) -> Tokenizer:
        """Load the tokenizer that the tokens were made with."""
        if self.tokenizer == "bytes":
            return load_tokenizer("bytes")
        return load_tokenizer(str(prefix.parent / self.tokenizer), self.eod)

    def check_vocabulary(self, model_vocab_size: int) -> None:
        """Raise `ConfigError` unless a model with this many embeddings knows every token."""
        if model_vocab_size < self.vocab_size:
            raise ConfigError(
                f"model.vocab_size={model_vocab_size} is smaller than the vocabulary of the data "
                f"({self.vocab_size}): leave it out, or prepare the data with a smaller tokenizer"
            )

    def identity(self) -> dict[str, Any]:
        """The part that a checkpoint keeps, to find out at resume whether the data is the same."""
        return {name: getattr(self, name) for name in IDENTITY}


IDENTITY = {
    "tokenizer_fingerprint": "the tokenizer",
    "vocab_size": "the vocabulary",
    "documents": "the number of documents",
    "tokens": "the number of tokens",
    "fingerprint": "the content",
}


def describe_change(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Say in a clause how the data differs between two `Metadata.identity()`; empty when it is the same."""
    changes = []
    for name, words in IDENTITY.items():
        if old.get(name) != new.get(name):
            numbers = isinstance(new.get(name), int)
            changes.append(f"{words} ({old.get(name)} before, {new.get(name)} now)" if numbers else words)
    return f"{', '.join(changes)} changed" if changes else ""
