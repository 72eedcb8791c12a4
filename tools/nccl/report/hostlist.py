"""Node names in Slurm's short form: n[1-3,7]."""

import re
from collections.abc import Iterable

_NAME = re.compile(r"^(.*?)(\d{1,18})(\D*)$")


def compress(names: Iterable[str]) -> str:
    """Write names as `--exclude` takes them, each once, in the order in which their prefixes occur."""
    groups: dict[tuple[str, int | None, str], list[int]] = {}
    for name in dict.fromkeys(names):
        found = _NAME.match(name)
        if found is None:
            groups[name, None, ""] = []
            continue
        prefix, digits, suffix = found.groups()
        # 8 and 12 are of one kind, 08 and 12 too; 8 and 08 are not.
        width = len(digits) if digits[0] == "0" and len(digits) > 1 else 0
        if not width and (prefix, len(digits), suffix) in groups:
            width = len(digits)
        groups.setdefault((prefix, width, suffix), []).append(int(digits))
    return ",".join(_one(*key, numbers) for key, numbers in groups.items())


def _one(prefix: str, width: int | None, suffix: str, numbers: list[int]) -> str:
    if width is None:
        return prefix
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    texts = [f"{a:0{width}}" if a == b else f"{a:0{width}}-{b:0{width}}" for a, b in runs]
    inside = texts[0] if len(numbers) == 1 else f"[{','.join(texts)}]"
    return f"{prefix}{inside}{suffix}"
