"""Windows, splits, steps and evaluation batches over token files."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import ConfigError, UserError
from train.config import DataConfig
from train.data.loader import Step, TokenWindows, TrainLoader, describe_change, validation_batches
from train.data.prepare import prepare
from train.model.llama import IGNORED


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten documents of 30 tokens, their end included."""
    folder = tmp_path_factory.mktemp("data")
    lines = [json.dumps({"text": f"{index}" + "abcdefghijklmnopqrstuvwxyzab"}) for index in range(10)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    prepare([folder / "a.jsonl"], folder / "out", workers=1)
    return folder / "out"


def all_tokens(prefix: Path) -> list[int]:
    return np.fromfile(f"{prefix}.bin", "<u2").tolist()


def edited(prefix: Path, target: Path, **changes: object) -> Path:
    """Copy token files, their metadata changed."""
    for ending in (".bin", ".idx"):
        (target.parent / (target.name + ending)).write_bytes(Path(f"{prefix}{ending}").read_bytes())
    metadata = json.loads(Path(f"{prefix}.json").read_text())
    Path(f"{target}.json").write_text(json.dumps(metadata | changes))
    return target


def samples(steps: list[Step]) -> list[list[int]]:
    return [row for step in steps for batch in step for row in batch.tokens.tolist()]


@pytest.mark.req("A13")
def test_windows_cover_the_tokens_and_share_one(prefix: Path) -> None:
    windows, tokens = TokenWindows(prefix, 7), all_tokens(prefix)
    assert windows.count == (300 - 1) // 7
    batch = windows.read(range(windows.count))
    assert batch.tokens.flatten().tolist() == tokens[: windows.count * 7]
    assert batch.targets.flatten().tolist() == tokens[1 : windows.count * 7 + 1]
    assert batch.targets.flatten().tolist() == windows.targets(windows.count).tolist()
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert batch.documents is None
    assert batch.tokens.is_contiguous()
    assert windows.read([3, 0]).tokens.tolist() == [tokens[21:28], tokens[:7]]


def test_the_last_window_may_end_with_the_last_token(prefix: Path) -> None:
    assert TokenWindows(prefix, 299).count == 1
    assert TokenWindows(prefix, 299).read([0]).targets[0, -1] == 256


def test_documents_are_told_apart_and_keep_their_end(prefix: Path) -> None:
    batch = TokenWindows(prefix, 40, mask_documents=True).read([0, 1])
    assert batch.documents.flatten().tolist() == [position // 30 for position in range(80)]
    assert batch.documents.dtype == torch.int64


@given(st.floats(0.001, 0.999), st.integers(1, 14))
def test_splits_part_at_a_document_and_miss_nothing(prefix: Path, fraction: float, length: int) -> None:
    train = TokenWindows(prefix, length, "train", fraction)
    held_out = TokenWindows(prefix, length, "validation", fraction)
    assert (train.start, train.end, held_out.end) == (0, held_out.start, 300)
    assert train.end % 30 == 0
    assert abs(train.end - min(max(300 * (1 - fraction), 30), 270)) <= 15
    tokens = all_tokens(prefix)
    assert held_out.read([0]).tokens[0].tolist() == tokens[held_out.start : held_out.start + length]
    assert train.read([train.count - 1]).targets.max() <= 256


def test_documents_of_the_held_out_split_are_numbered_by_the_file(prefix: Path) -> None:
    held_out = TokenWindows(prefix, 29, "validation", 0.2, mask_documents=True)
    assert held_out.read([0, 1]).documents.unique().tolist() == [8, 9]


def test_a_configuration_opens_windows(prefix: Path) -> None:
    config = DataConfig(str(prefix), sequence_length=5, validation_fraction=0.3, mask_documents=True)
    held_out = TokenWindows.open(config, "validation")
    assert (held_out.start, held_out.sequence_length, held_out.mask_documents) == (210, 5, True)
    assert held_out.load_tokenizer().decode(held_out.read([0]).tokens[0]) == "7abcd"


def test_splits_that_cannot_be_made_are_one_sentence(prefix: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sequence_length=300 does not fit into the train split"):
        TokenWindows(prefix, 300)
    with pytest.raises(ConfigError, match="sequence_length=30 does not fit into the validation split"):
        TokenWindows(prefix, 30, "validation", 0.1)
    with pytest.raises(ConfigError, match="validation_fraction=0 holds nothing out"):
        TokenWindows(prefix, 4, "validation", 0.0)
    (tmp_path / "one.txt").write_text("a single document")
    prepare([tmp_path / "one.txt"], tmp_path / "one", workers=1)
    with pytest.raises(ConfigError, match="a single document"):
        TokenWindows(tmp_path / "one", 4, "train", 0.5)


def test_files_that_do_not_belong_together_are_refused(prefix: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="do not belong together"):
        TokenWindows(edited(prefix, tmp_path / "x", tokens=299), 4)
    with pytest.raises(UserError, match="trierarch data prepare"):
        TokenWindows(tmp_path / "missing", 4)


def test_a_token_outside_the_vocabulary_is_caught(prefix: Path, tmp_path: Path) -> None:
    windows = TokenWindows(edited(prefix, tmp_path / "x", vocab_size=256), 29)
    with pytest.raises(UserError, match="holds token 256, outside the vocabulary of 256"):
        windows.read([0])


def test_a_model_too_small_for_the_data_is_refused(prefix: Path) -> None:
    metadata = TokenWindows(prefix, 4).metadata
    metadata.check_vocabulary(257)
    with pytest.raises(ConfigError, match=r"vocab_size=256 is smaller than .*257"):
        metadata.check_vocabulary(256)


def loader(prefix: Path, ranks: int = 1, rank: int = 0, consumed: int = 0, micro: int = 2, **options: int):
    return TrainLoader(
        TokenWindows(prefix, 7),
        seed=options.get("seed", 3),
        global_batch_size=12,
        micro_batch_size=micro,
        dp_rank=rank,
        dp_size=ranks,
        consumed_samples=consumed,
        prefetch_batches=options.get("prefetch", 0),
    )


def take(count: int, *args: object, **options: int) -> list[Step]:
    with loader(*args, **options) as steps:
        return [next(steps) for _ in range(count)]


@pytest.mark.req("A13")
@pytest.mark.parametrize("prefetch", [1, 5])
def test_reading_ahead_changes_nothing(prefix: Path, prefetch: int) -> None:
    plain, ahead = take(9, prefix), take(9, prefix, prefetch=prefetch)
    assert samples(plain) == samples(ahead)
    assert [step.consumed_samples for step in ahead] == [12 * (step + 1) for step in range(9)]
    assert all(len(step) == 6 for step in ahead)


@pytest.mark.req("A13", "A22")
def test_a_stopped_run_continues_with_the_next_sample_on_other_ranks(prefix: Path) -> None:
    """Three epochs and a half in one go, against the same with a stop and 3 ranks instead of 1."""
    whole = take(12, prefix)
    first = take(5, prefix, prefetch=4)  # what was read ahead is not counted as taken
    ranks = [take(7, prefix, 3, rank, first[-1].consumed_samples, 1, prefetch=2) for rank in range(3)]
    for step in range(12):
        seen = [first[step]] if step < 5 else [rank[step - 5] for rank in ranks]
        assert sorted(samples(seen)) == sorted(samples([whole[step]]))


def test_an_epoch_takes_every_window_once(prefix: Path) -> None:
    count = TokenWindows(prefix, 7).count
    taken = samples(take(-(-2 * count // 12), prefix))[: 2 * count]
    everything = sorted(TokenWindows(prefix, 7).read(range(count)).tokens.tolist())
    assert sorted(taken[:count]) == sorted(taken[count:]) == everything
    assert taken[:count] != taken[count:]
    assert samples(take(1, prefix, seed=4)) != samples(take(1, prefix))


def test_an_error_of_the_thread_reaches_the_caller(prefix: Path, tmp_path: Path) -> None:
    damaged = edited(prefix, tmp_path / "x", vocab_size=256)
    with loader(damaged, prefetch=3) as steps, pytest.raises(UserError, match="outside the vocabulary"):
        for _ in range(50):
            next(steps)


def test_the_thread_ends_with_its_loader(prefix: Path) -> None:
    before = set(threading.enumerate())
    steps = loader(prefix, prefetch=2)
    thread = (set(threading.enumerate()) - before).pop()
    assert thread.daemon
    next(steps)
    steps.close()
    steps.close()
    assert not thread.is_alive()
    with pytest.raises(StopIteration):
        next(steps)


def test_a_batch_that_does_not_divide_is_refused_at_once(prefix: Path) -> None:
    with pytest.raises(ConfigError, match="global_batch_size=12"):
        loader(prefix, ranks=5)


def test_a_batch_moves_as_one(prefix: Path) -> None:
    plain = TokenWindows(prefix, 7).read([0]).to(torch.device("meta"))
    assert (plain.tokens.device.type, plain.targets.device.type, plain.documents) == ("meta", "meta", None)
    masked = TokenWindows(prefix, 7, mask_documents=True).read([0]).to(torch.device("meta"))
    assert masked.documents.device.type == "meta"


@pytest.mark.req("A13")
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 7), st.integers(1, 3))
def test_evaluation_reads_each_sample_once_on_any_number_of_ranks(
    prefix: Path, count: int, micro: int, ranks: int, at_once: int
) -> None:
    windows = TokenWindows(prefix, 7)
    dealt = [list(validation_batches(windows, count, micro, rank, ranks, at_once)) for rank in range(ranks)]
    assert len({len(items) for items in dealt}) == 1, "collectives between the ranks match"
    items = [item for mine in dealt for item in mine]
    assert all(len(item) == at_once for item in items)
    batches = [batch for item in items for batch in item]
    assert all(batch.tokens.shape == batch.targets.shape == (micro, 7) for batch in batches)
    counted = [
        (tokens, targets)
        for batch in batches
        for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True)
        if targets != [IGNORED] * 7
    ]
    expected = windows.read(range(min(count, windows.count)))
    assert sorted(counted) == sorted(zip(expected.tokens.tolist(), expected.targets.tolist(), strict=True))


def test_a_change_of_the_data_is_told(prefix: Path, tmp_path: Path) -> None:
    old = TokenWindows(prefix, 4).fingerprint
    assert json.loads(json.dumps(old)) == old
    assert describe_change(old, old) == ""
    changed = edited(prefix, tmp_path / "x", tokenizer_fingerprint="other", fingerprint="other")
    assert describe_change(old, TokenWindows(changed, 4).fingerprint) == "the tokenizer, the content changed"
    told = describe_change(old, old | {"tokens": 5})
    assert told == "the number of tokens (300 before, 5 now) changed"
