"""A vocabulary that is to come from the data, where there is no time to open that. Imports no numpy."""

import dataclasses
import json
from pathlib import Path

from train.config import TrainConfig
from train.model.config import padded_vocabulary


def with_vocabulary(config: TrainConfig) -> TrainConfig:
    """Return `config` with the vocabulary that is to come from the data, if the data is there; else as it is."""
    if config.model.vocab_size is not None:
        return config
    try:
        facts = json.loads(Path(f"{config.data.prefix}.json").read_text(encoding="utf-8"))
        vocabulary = padded_vocabulary(int(facts["vocab_size"]))
    except (OSError, ValueError, KeyError, TypeError):  # whoever trains on it says what is wrong with it
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocabulary))
