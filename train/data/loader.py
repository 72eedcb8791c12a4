"""Batches for a run: windows over token files, read ahead, at a position that the trainer owns."""

import math
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from contract.errors import ConfigError, UserError
from train.config import DataConfig
from train.data.indexed import IndexedTokens, Int64Array, Tokens
from train.data.metadata import Metadata, describe_change
from train.data.order import batch_indices, shuffled
from train.data.tokenizer import Tokenizer
from train.model.llama import IGNORED

__all__ = [
    "Batch",
    "Step",
    "TokenWindows",
    "TrainLoader",
    "batch_indices",
    "describe_change",
    "shuffled",
    "validation_batches",
]

Split = Literal["train", "validation"]
POLL_S = 0.1
"""How often a reader that waits for room looks whether it is to end."""

CLOSE_S = 5.0


class Batch(NamedTuple):
    """Samples side by side: int64 tensors of (samples, sequence_length) each."""

    tokens: torch.Tensor
    targets: torch.Tensor
    """The token that follows each of `tokens`."""
    documents: torch.Tensor | None = None
    """Number of the document that each of `tokens` belongs to; None unless documents are masked."""

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device; from pinned memory the copy does not wait."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        """Return the batch in page-locked memory."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        documents = None if self.documents is None else change(self.documents)
        return Batch(change(self.tokens), change(self.targets), documents)


@dataclass(frozen=True)
class Step:
    """The micro-batches that one rank takes in one optimizer step."""

    micro_batches: list[Batch]
    consumed_samples: int
    """Samples that all ranks have taken in the run, this step included."""

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)


class TokenWindows:
    """Fixed windows of sequence_length + 1 tokens over one split; neighbours share one token.

    Validation is the last `validation_fraction` of the tokens, cut at the nearest boundary of documents that
    leaves at least one on each side. Tokens after the last whole window are left out.

    Raises `UserError` for broken files or ones that do not belong together, and `ConfigError` for a split that
    cannot be made or is too short.
    """

    def __init__(
        self,
        prefix: Path,
        sequence_length: int,
        split: Split = "train",
        validation_fraction: float = 0.0,
        mask_documents: bool = False,
    ) -> None:
        self.prefix, self.sequence_length, self.mask_documents = prefix, sequence_length, mask_documents
        self.metadata = Metadata.read(prefix)
        self._data = IndexedTokens(prefix)
        _check_pair(prefix, self.metadata, self._data)
        self.start, self.end = _bounds(prefix, self._data.document_offsets, split, validation_fraction)
        self.count = (self.end - self.start - 1) // sequence_length
        if self.count < 1:
            raise ConfigError(
                f"data.sequence_length={sequence_length} does not fit into the {split} split of {prefix}, which "
                f"has {self.end - self.start} tokens: choose a shorter one, or prepare more data"
            )

    @classmethod
    def open(cls, config: DataConfig, split: Split) -> "TokenWindows":
        """Open the split that a configuration describes."""
        prefix, fraction = Path(config.prefix), config.validation_fraction
        return cls(prefix, config.sequence_length, split, fraction, config.mask_documents)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint keeps, to find out at resume whether the data is the same (`describe_change`)."""
        return self.metadata.identity()

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer that the tokens were made with."""
        return self.metadata.load_tokenizer(self.prefix)

    def read(self, indices: Sequence[int] | Int64Array) -> Batch:
        """Read windows by number, 0 <= i < count, in the order given. Raises `UserError` for a wrong token."""
        starts = self.start + np.asarray(indices, dtype=np.int64) * self.sequence_length
        spans = [self._data[start : start + self.sequence_length + 1] for start in starts.tolist()]
        window = np.stack(spans).astype(np.int64)
        self._check_ids(window)
        documents = self._documents(starts) if self.mask_documents else None
        return Batch(
            torch.from_numpy(window[:, :-1].copy()), torch.from_numpy(window[:, 1:].copy()), documents
        )

    def targets(self, count: int) -> Tokens:
        """All targets of the first `count` windows in one piece, as a view of the file: what they evaluate."""
        return self._data[self.start + 1 : self.start + 1 + count * self.sequence_length]

    def _documents(self, starts: Int64Array) -> torch.Tensor:
        positions = starts[:, None] + np.arange(self.sequence_length)
        return torch.from_numpy(np.searchsorted(self._data.document_offsets, positions, side="right") - 1)

    def _check_ids(self, window: npt.NDArray[np.int64]) -> None:
        """On a GPU an id outside the embedding ends the process with an assertion that names nothing."""
        if window.size and not 0 <= int(window.min()) <= int(window.max()) < self.metadata.vocab_size:
            raise UserError(
                f"{self.prefix}.bin holds token {window.max() if window.min() >= 0 else window.min()}, outside the "
                f"vocabulary of {self.metadata.vocab_size}: the file is damaged; copy it again or make it anew"
            )


def _check_pair(prefix: Path, metadata: Metadata, data: IndexedTokens) -> None:
    said, found = (metadata.tokens, metadata.documents), (data.tokens, data.documents)
    if said != found:
        raise UserError(
            f"{prefix}.json speaks of {said[0]} tokens in {said[1]} documents, {prefix}.idx of {found[0]} in "
            f"{found[1]}: they do not belong together; make them anew with `trierarch data prepare`"
        )


def _bounds(prefix: Path, offsets: Int64Array, split: Split, fraction: float) -> tuple[int, int]:
    """First token of a split and the one after its last."""
    total = int(offsets[-1])
    if fraction == 0:
        if split == "validation":
            raise ConfigError("data.validation_fraction=0 holds nothing out: there is nothing to evaluate on")
        return 0, total
    inner = offsets[(offsets > 0) & (offsets < total)]
    if inner.size == 0:
        raise ConfigError(
            f"data.validation_fraction={fraction}: {prefix} has a single document, so none can be held out; "
            f"prepare more documents, or set it to 0 with loop.eval_batches=0"
        )
    cut = int(inner[np.abs(inner - total * (1 - fraction)).argmin()])
    return (0, cut) if split == "train" else (cut, total)


class TrainLoader:
    """The training steps of one data-parallel rank from `consumed_samples` on, without an end.

    Which samples a step has depends on `seed` and `consumed_samples` alone; the trainer keeps the latter. A
    thread reads `prefetch_batches` steps ahead; what goes wrong there is raised by `next()`. On a machine with
    CUDA the tensors are pinned. Close it, or use it as a context.
    """

    def __init__(
        self,
        windows: TokenWindows,
        *,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        consumed_samples: int = 0,
        prefetch_batches: int = 2,
    ) -> None:
        batch_indices(consumed_samples, global_batch_size, dp_rank, dp_size, micro_batch_size)  # raises early
        self._windows, self._seed, self._next = windows, seed, consumed_samples
        self._shape = (global_batch_size, dp_rank, dp_size, micro_batch_size)
        self._pin = torch.cuda.is_available()
        self._ended = threading.Event()
        self._ahead: queue.Queue[Step | BaseException] = queue.Queue(maxsize=max(1, prefetch_batches))
        self._thread: threading.Thread | None = None
        if prefetch_batches > 0:
            self._thread = threading.Thread(target=self._read_ahead, name="train-loader", daemon=True)
            self._thread.start()

    def __iter__(self) -> "TrainLoader":
        return self

    def __next__(self) -> Step:
        if self._ended.is_set():
            raise StopIteration
        if self._thread is None:
            return self._read()
        step = self._ahead.get()  # the thread always answers: with a step or with what ended it
        if isinstance(step, BaseException):
            self.close()
            raise step
        return step

    def __enter__(self) -> "TrainLoader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread, or leave it to the end of the process when a file system keeps it; may be repeated."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _read(self) -> Step:
        indices = batch_indices(self._next, *self._shape)
        samples = shuffled(self._seed, indices, self._windows.count)
        batches = [self._windows.read(micro) for micro in samples]
        self._next += self._shape[0]
        return Step([batch.pinned() for batch in batches] if self._pin else batches, self._next)

    def _read_ahead(self) -> None:
        while not self._ended.is_set():
            try:
                answer: Step | BaseException = self._read()
            except BaseException as error:
                answer = error
            self._put(answer)
            if isinstance(answer, BaseException):
                return

    def _put(self, answer: Step | BaseException) -> None:
        while not self._ended.is_set():
            with suppress(queue.Full):
                self._ahead.put(answer, timeout=POLL_S)
                return


def validation_batches(
    windows: TokenWindows,
    samples: int,
    micro_batch_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    at_once: int = 1,
) -> Iterator[list[Batch]]:
    """Yield the first `samples` windows (all, if there are fewer), in order, spread over the ranks.

    Each item holds `at_once` batches of `micro_batch_size` samples, the same number on each rank, so that
    collectives between them match; each sample goes to exactly one rank. Where no sample is left others stand in,
    whose targets are all `IGNORED`: sum losses and counts over ranks, then divide.
    """
    samples = min(samples, windows.count)
    shape = (at_once, dp_size, micro_batch_size)
    for start in range(0, samples, math.prod(shape)):
        numbers = np.arange(start, start + math.prod(shape)).reshape(shape)[:, dp_rank]
        yield [_padded(windows, micro, samples) for micro in numbers]


def _padded(windows: TokenWindows, numbers: Int64Array, samples: int) -> Batch:
    """Read windows by number; those from `samples` on are stand-ins."""
    batch = windows.read(np.where(numbers < samples, numbers, 0))
    batch.targets[torch.from_numpy(numbers >= samples)] = IGNORED
    return batch
