"""Text for toy runs; imports no torch."""

import random
from pathlib import Path


def write_toy_text(folder: Path, documents: int = 60) -> Path:
    """Write a folder of small documents of made-up words; the same each time."""
    words = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(documents):
        text = " ".join(words.choice(["row", "oar", "mast", "sail", "keel"]) for _ in range(80))
        (folder / f"{index:03}.txt").write_text(text)
    return folder
