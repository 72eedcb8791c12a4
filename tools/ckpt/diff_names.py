"""Which tensor of one checkpoint is which of another, and where in the model it belongs."""

import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from tools.ckpt.pieces import Entry
from tools.ckpt.roles import FIRST, MASTER, OPTIMIZER, SECOND, STEPS, WEIGHTS

_WRAPPERS = frozenset({"module", "model", "state_dict", "model_state_dict", "transformer"})
"""What libraries put before the names of parameters."""
_INNER_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_OPTIMIZERS = frozenset({"optimizer", "optim", "optimizer_state_dict"})
_OF_PARAMETERS = frozenset({WEIGHTS, FIRST, SECOND, MASTER, STEPS, OPTIMIZER})
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")


@dataclass
class Matches:
    """Tensors of two checkpoints, paired."""

    pairs: list[tuple[Entry, Entry]] = field(default_factory=list)
    """In the order of the first checkpoint."""
    by_bare_name: int = 0
    """How many pairs differ in the prefix of their names only."""
    removed: list[Entry] = field(default_factory=list)
    added: list[Entry] = field(default_factory=list)
    renamed: list[tuple[Entry, Entry]] = field(default_factory=list)
    """Names differ, content does not."""


def match(a: list[Entry], b: list[Entry]) -> Matches:
    """Pair tensors by name, those left over by their name without the prefixes that libraries add.

    A name that several would have without its prefix pairs nothing. A second name of a tensor of the same file
    (tied weights) is nothing that could be missing.
    """
    exact = {entry.name: entry for entry in b}
    found = {entry.name: exact[entry.name] for entry in a if entry.name in exact}
    taken = set(found)
    bare_a = _unique(entry for entry in a if entry.name not in taken)
    bare_b = _unique(entry for entry in b if entry.name not in taken)
    by_bare = {entry.name: bare_b[key] for key, entry in bare_a.items() if key in bare_b}
    found |= by_bare
    partners = {entry.name for entry in found.values()}
    return Matches(
        pairs=[(entry, found[entry.name]) for entry in a if entry.name in found],
        by_bare_name=len(by_bare),
        removed=[entry for entry in a if entry.name not in found and entry.tied_to is None],
        added=[entry for entry in b if entry.name not in partners and entry.tied_to is None],
    )


def pair_by_content(
    matches: Matches, hash_a: Callable[[Entry], Hashable], hash_b: Callable[[Entry], Hashable]
) -> None:
    """Move to `renamed` what is left over in both, with the same role, type, shape and hash.

    Hashes are asked for only where there is something to pair with. Empty tensors have no content to go by.
    """
    full = {_kind(entry) for entry in matches.removed if entry.elements}
    kinds = full & {_kind(entry) for entry in matches.added}
    waiting: dict[Hashable, list[Entry]] = {}
    for entry in matches.added:
        if _kind(entry) in kinds:
            waiting.setdefault((_kind(entry), hash_b(entry)), []).append(entry)
    removed = []
    for entry in matches.removed:
        same = waiting.get((_kind(entry), hash_a(entry))) if _kind(entry) in kinds else None
        if same:
            matches.renamed.append((entry, same.pop(0)))
        else:
            removed.append(entry)
    new_names = {entry.name for _, entry in matches.renamed}
    matches.removed = removed
    matches.added = [entry for entry in matches.added if entry.name not in new_names]


def bare_name(entry: Entry) -> str:
    """Return a name without what libraries add: wrappers, and the place of a tensor in an optimizer's state."""
    words = [word for word in entry.name.split(".") if word not in _INNER_WRAPPERS]
    if words[0] not in _OPTIMIZERS or len(words) < 3:
        return ".".join(_unwrapped(words))
    words = words[1:]
    if words[0] != "state":
        return ".".join(("optimizer", *_unwrapped(words)))
    words = words[1:]
    if words[0] in ("exp_avg", "exp_avg_sq", "fp32_param"):  # Megatron has the kind first
        words = [*words[1:], words[0]]
    return ".".join(("optimizer", *_unwrapped(words)))


def place_of(entry: Entry) -> str:
    """Say where in the model a tensor belongs: `layer 3`, or the module's name; empty where that has no meaning."""
    if entry.role not in _OF_PARAMETERS:
        return ""
    found = _LAYER.search(entry.name)
    if found:
        return f"layer {int(found[1])}"
    words = bare_name(entry).removeprefix("optimizer.").split(".")
    if words[-1] in ("exp_avg", "exp_avg_sq", "step", "max_exp_avg_sq", "fp32", "fp32_param"):
        words = words[:-1]
    return ".".join(words[:-1] or words)


def _kind(entry: Entry) -> Hashable:
    return entry.role, entry.dtype, entry.shape


def _unwrapped(words: list[str]) -> list[str]:
    while len(words) > 1 and words[0] in _WRAPPERS:
        words = words[1:]
    return words


def _unique(entries: Iterable[Entry]) -> dict[str, Entry]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(bare_name(entry), []).append(entry)
    return {name: same[0] for name, same in found.items() if len(same) == 1}
