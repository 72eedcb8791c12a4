"""The three sizes of DeepSpeed's batch: what is not given follows from the others, as DeepSpeed has it."""

from dataclasses import dataclass

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """Samples a step over all ranks, samples a rank takes at once, and how often it does for one step."""

    train: int
    micro: int
    steps: int


def settle(train: int | None, micro: int | None, steps: int | None, ranks: int) -> Batch:
    """Fill in what is None; `ranks` are the data-parallel ones.

    Raises ValueError, a sentence, for sizes that do not go together and for too few of them.
    """
    if train is None and micro is None:
        raise ValueError(f"neither {TRAIN} nor {MICRO} is given: give one of them, or both")
    if train is None:
        assert micro is not None
        steps = 1 if steps is None else steps
        train = micro * steps * ranks
    elif micro is None:
        steps = 1 if steps is None else steps
        micro = train // ranks // steps
    elif steps is None:
        steps = train // micro // ranks
    if train != micro * steps * ranks or not train:
        ranks_of = f"{ranks} data-parallel rank{'s' * (ranks > 1)}"
        if not micro or not steps:
            raise ValueError(f"{TRAIN}={train} is too small for {ranks_of}: raise it, or take fewer ranks")
        raise ValueError(
            f"{TRAIN}={train} is not {MICRO}={micro} x {STEPS}={steps} x {ranks_of} = {micro * steps * ranks}: "
            "change one of them, or leave one out"
        )
    return Batch(train, micro, steps)
