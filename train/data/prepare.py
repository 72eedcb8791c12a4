"""Make token files of text: in parallel, continuing where an interrupted run stopped, published at the end.

Work is cut into shards that depend on the sources alone, so the result does not depend on the number of
workers. Finished shards wait in `<prefix>.parts/`, each named by what it was made of; a changed source is
made anew. What the user sees, `<prefix>.bin`, `.idx`, `.json` and `.tokenizer.json`, appears when all is done.
"""

import errno
import fcntl
import hashlib
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from contract.errors import ConfigError, UserError
from train.data.indexed import IndexedTokens, IndexedWriter, dtype_for, with_ending
from train.data.metadata import Metadata
from train.data.shards import Job, Skipped, finish_shard, read_documents, read_part
from train.data.sources import Shard, cut_into_shards, find_files, fingerprint
from train.data.tokenizer import load_tokenizer
from train.data.tokenizer import train_bpe as train_tokenizer

FORMAT = 1
"""Raise it when the same sources would give other tokens than before."""
TRAINING_BYTES = 2**26
"""Text that a tokenizer is trained on, from shards spread evenly over the sources."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Answers of shared file systems that are mounted without locks: better to prepare without one than not at all."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Report:
    """What a preparation did."""

    metadata: Metadata
    shards: int
    reused: int
    """Shards that an earlier, interrupted run had finished; all of them when there was nothing to do."""


def prepare(
    sources: Sequence[Path],
    prefix: Path,
    tokenizer: str = "bytes",
    *,
    train_bpe: int | None = None,
    glob: str = "**/*",
    exclude: Collection[str] = (),
    json_key: str = "text",
    workers: int | None = None,
    shuffle_seed: int | None = None,
    eod: str | None = None,
    on_progress: Progress = lambda done_bytes, total_bytes: None,
) -> Report:
    """Tokenise `sources` into `<prefix>.bin` and its companions.

    A source is a text file (one document), JSON lines (`.jsonl`, `.jsonl.gz`: one document a line, its text
    under `json_key`), or a folder of such files: those that match `glob`, without what is named in `exclude`, in
    the order of their names or shuffled under `shuffle_seed`. An end-of-document token (`eod`, found by
    itself for well-known tokenizers) follows each document. `train_bpe` trains a byte-level BPE of that
    vocabulary on the sources first. `workers` is the number of processes, by default one for each core that this
    process may use.

    Files that are binary or not UTF-8, and empty documents, are left out and counted in the metadata. Raises
    `UserError`; nothing that existed is changed then, and finished shards are kept for the next try. When the
    token files were made of the same sources in the same way, nothing is done.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers {workers}: give at least 1, or leave it out to use every core")
    if train_bpe is not None and (tokenizer != "bytes" or eod is not None):
        raise ConfigError("--train-bpe makes its own tokenizer: leave out --tokenizer and --eod")
    files = find_files(sources, glob, exclude, shuffle_seed, own=prefix)
    shards = cut_into_shards(files)
    if not shards:
        raise UserError(f"no file matches {glob} in {', '.join(map(str, sources))}: nothing to prepare")
    try:
        with _only_one(prefix) as parts:
            recipe = _recipe(tokenizer, train_bpe, json_key, eod)
            whole = _recipe_of_all(recipe, shards)
            found = _up_to_date(prefix, whole)
            if found:
                return Report(found, len(shards), len(shards))
            ours = _own_tokenizer(tokenizer, train_bpe, parts, shards, json_key, whole)
            job = Job(ours, eod, json_key, recipe, parts)
            reused = _finish_shards(job, shards, workers or len(os.sched_getaffinity(0)), on_progress)
            metadata = _merge(job, shards, prefix, whole)
            shutil.rmtree(parts)
            return Report(metadata, len(shards), reused)
    except OSError as error:
        raise UserError(
            f"cannot write {error.filename or prefix} ({error.strerror}): make room or choose another place, "
            f"then run again; what is finished is kept"
        ) from None


@contextmanager
def _only_one(prefix: Path) -> Iterator[Path]:
    """Make the folder of parts and hold a lock on it, so that two runs do not publish one prefix."""
    parts = with_ending(prefix, ".parts")
    parts.mkdir(parents=True, exist_ok=True)
    path = with_ending(prefix, ".lock")
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process prepares {prefix} now: wait for it, or end it") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        try:
            yield parts
        finally:
            with suppress(OSError):  # it has finished shards for the next try
                parts.rmdir()
            path.unlink(missing_ok=True)


def _recipe(tokenizer: str, train_bpe: int | None, json_key: str, eod: str | None) -> str:
    """Describe all but the sources that the tokens depend on."""
    made_by = f"bpe:{train_bpe}" if train_bpe is not None else load_tokenizer(tokenizer, eod).fingerprint
    return repr((FORMAT, made_by, json_key, eod))


def _recipe_of_all(recipe: str, shards: Sequence[Shard]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for shard in shards:
        digest.update(fingerprint(recipe, shard).encode())
    return digest.hexdigest()


def _up_to_date(prefix: Path, recipe: str) -> Metadata | None:
    """Return the metadata of token files that are whole and were made of the very same sources."""
    try:
        metadata = Metadata.read(prefix)
        data = IndexedTokens(prefix)
        metadata.load_tokenizer(prefix)
    except UserError:
        return None
    same = metadata.recipe == recipe and data.tokens == metadata.tokens
    return metadata if same else None


def _own_tokenizer(
    spec: str, train_bpe: int | None, parts: Path, shards: Sequence[Shard], json_key: str, recipe: str
) -> str:
    """Return `bytes`, or the path of our copy of the tokenizer: given, or trained now."""
    if train_bpe is not None:
        path = parts / f"trained-{recipe}.tokenizer.json"
        if not path.exists():
            train_tokenizer(_training_texts(shards, json_key), train_bpe, path)
        return str(path)
    if spec == "bytes":
        return spec
    return str(shutil.copyfile(spec, parts / f"given-{recipe}.tokenizer.json"))


def _training_texts(shards: Sequence[Shard], json_key: str) -> Iterator[str]:
    """Yield up to about TRAINING_BYTES of text from shards at even distances."""
    total = sum(piece.end - piece.start for shard in shards for piece in shard)
    left = TRAINING_BYTES
    for shard in shards[:: -(-total // TRAINING_BYTES) or 1]:
        for piece in shard:
            for text in read_documents(piece, json_key, Skipped()):
                yield text[:left]
                left -= len(text)
                if left <= 0:
                    return


def _finish_shards(job: Job, shards: Sequence[Shard], workers: int, on_progress: Progress) -> int:
    """Tokenise the shards that are not finished yet; return how many were."""
    sizes = [sum(piece.end - piece.start for piece in shard) for shard in shards]
    waiting = [index for index, shard in enumerate(shards) if not job.part(shard).exists()]
    done = sum(sizes) - sum(sizes[index] for index in waiting)
    on_progress(done, sum(sizes))
    for index in _run(job, shards, waiting, workers):
        done += sizes[index]
        on_progress(done, sum(sizes))
    return len(shards) - len(waiting)


def _run(job: Job, shards: Sequence[Shard], waiting: Sequence[int], workers: int) -> Iterator[int]:
    """Yield the index of each shard as it is finished."""
    if workers == 1 or len(waiting) <= 1:
        for index in waiting:
            finish_shard(job, shards[index])
            yield index
        return
    # Not fork: threads of the tokenizers library may hold a lock at that moment, for ever in the child.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(waiting)), context, initializer=_start_worker) as pool:
        futures = {pool.submit(finish_shard, job, shards[index]): index for index in waiting}
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BrokenProcessPool:
            raise UserError(
                "a worker process was killed, perhaps for want of memory: run again with fewer --workers; "
                "what is finished is kept"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent killed by SIGKILL tells nobody; its workers would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a worker only"
    wait([parent.sentinel])
    os._exit(1)


def _merge(job: Job, shards: Sequence[Shard], prefix: Path, recipe: str) -> Metadata:
    """Join the finished shards and publish them, the index last."""
    tokenizer = load_tokenizer(job.tokenizer, job.eod)
    skipped, documents, tokens, text_bytes = Skipped(), 0, 0, 0
    dtype = dtype_for(tokenizer.vocab_size)
    with IndexedWriter(prefix, dtype) as writer:
        for shard in shards:
            part = read_part(job.part(shard))
            writer.append(part.tokens, part.lengths)
            skipped.merge(part.skipped)
            documents += len(part.lengths)
            tokens += len(part.tokens)
            text_bytes += part.text_bytes
        if documents == 0:
            reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.reasons.items())
            raise UserError(f"the sources hold no document ({reasons or 'no lines'}): nothing to prepare")
        name = "bytes" if job.tokenizer == "bytes" else with_ending(prefix, ".tokenizer.json").name
        metadata = Metadata(
            tokenizer=name,
            tokenizer_fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            eod_id=tokenizer.eod_id,
            documents=documents,
            tokens=tokens,
            text_bytes=text_bytes,
            dtype=dtype.name,
            fingerprint=writer.finish(),
            recipe=recipe,
            skipped=dict(skipped.reasons),
            skipped_examples=skipped.examples,
        )
        _publish(writer, prefix, metadata, job.tokenizer)
    return metadata


def _publish(writer: IndexedWriter, prefix: Path, metadata: Metadata, tokenizer: str) -> None:
    """Give everything its name. The old index goes first: no mixture of old and new can be read."""
    texts = {".json": metadata.to_json()}
    if tokenizer != "bytes":
        texts[".tokenizer.json"] = Path(tokenizer).read_text(encoding="utf-8")
    try:
        for ending, text in texts.items():
            _write(with_ending(prefix, ending + ".partial"), text)
        with_ending(prefix, ".idx").unlink(missing_ok=True)
        for ending in texts:
            with_ending(prefix, ending + ".partial").rename(with_ending(prefix, ending))
        writer.publish()
    finally:
        for ending in texts:
            with_ending(prefix, ending + ".partial").unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
