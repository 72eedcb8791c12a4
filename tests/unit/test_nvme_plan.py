"""Where the blocks of slots lie, and the settings that say how large they are."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import ConfigError, UserError
from train.offload.nvme.files import ALIGN_BYTES, round_up
from train.offload.nvme.plan import Plan
from train.offload.nvme.settings import NvmeSettings

SIZES = st.lists(
    st.one_of(st.integers(0, 100_000), st.sampled_from([0, 1, ALIGN_BYTES - 1, ALIGN_BYTES, ALIGN_BYTES + 1]))
)


@pytest.mark.req("C6")
@given(sizes=SIZES, paths=st.integers(1, 5), pages=st.integers(1, 4))
def test_slots_are_whole_aligned_and_apart(sizes: list[int], paths: int, pages: int) -> None:
    block_bytes = pages * ALIGN_BYTES
    plan = Plan(paths, block_bytes)
    slots = [plan.add(str(index), size) for index, size in enumerate(sizes)]
    taken: list[set[int]] = [set() for _ in range(paths)]
    for slot, size in zip(slots, sizes, strict=True):
        pieces = list(plan.pieces(slot))
        # The bytes of the slot, each once and in order.
        assert [piece.begin for piece in pieces] == list(range(0, size, block_bytes))
        assert [piece.end for piece in pieces] == [min(piece.begin + block_bytes, size) for piece in pieces]
        for piece in pieces:
            assert piece.offset % ALIGN_BYTES == 0
            length = round_up(piece.end - piece.begin)
            assert piece.offset + length <= plan.file_bytes[piece.path]
            pages_of_it = set(range(piece.offset // ALIGN_BYTES, (piece.offset + length) // ALIGN_BYTES))
            assert not pages_of_it & taken[piece.path]
            taken[piece.path] |= pages_of_it
    # Nothing is wasted, and no disk has much more than another.
    for pages_of_path, file_bytes in zip(taken, plan.file_bytes, strict=True):
        assert len(pages_of_path) * ALIGN_BYTES == file_bytes
    assert max(plan.file_bytes) - min(plan.file_bytes) <= 2 * block_bytes


def test_a_large_slot_uses_all_paths() -> None:
    plan = Plan(4, 1 << 20)
    slot = plan.add("weights", 8 << 20)
    assert [piece.path for piece in plan.pieces(slot)] == [0, 1, 2, 3] * 2
    assert plan.file_bytes == [2 << 20] * 4


def test_settings_are_those_of_the_path(tmp_path: Path) -> None:
    assert NvmeSettings.load(tmp_path) == NvmeSettings()
    tuned = NvmeSettings(block_bytes=4 << 20, threads=4, measured={"read_bytes_per_s": 1})
    tuned.save(tmp_path / "nvme.json")
    assert NvmeSettings.load(tmp_path) == NvmeSettings.load(tmp_path / "nvme.json") == tuned
    (tmp_path / "few.json").write_text('{"threads": 3}')
    assert NvmeSettings.load(tmp_path / "few.json") == NvmeSettings(threads=3)
    with pytest.raises(UserError, match=r"missing/nvme.json cannot be written \(No such file"):
        tuned.save(tmp_path / "missing" / "nvme.json")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "holds no JSON: write it anew"),
        ("[]", "holds no settings"),
        ('{"thread": 2}', "thread is no setting, did you mean threads"),
        ('{"threads": 0}', "threads=0: must be from 1 to 64"),
        ('{"threads": true}', "threads=True: must be a whole number"),
        ('{"block_bytes": 1000}', "block_bytes=1000: must be a multiple of 4096"),
        ('{"slow_s": 200}', "slow_s=200 and limit_s=120.0"),
        ('{"limit_s": "long"}', "limit_s='long': must be a number of seconds"),
    ],
)
def test_wrong_settings_are_refused_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "nvme.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        NvmeSettings.load(tmp_path)
    assert str(refused.value).startswith(str(file)) and sentence in str(refused.value)


def test_a_settings_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"other.json does not exist: write it with `trierarch nvme-bench"):
        NvmeSettings.load(tmp_path / "other.json")


def test_settings_are_plain_json(tmp_path: Path) -> None:
    NvmeSettings().save(tmp_path / "nvme.json")
    assert json.loads((tmp_path / "nvme.json").read_text())["block_bytes"] == 1 << 20
