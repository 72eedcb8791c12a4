"""Sizes of matrices that a GPU's matrix units do not take whole."""

from collections.abc import Iterator

from tools.doctor.facts import Facts
from tools.doctor.finding import About, Finding, check, note, warning
from train.layout.holding import share

ALIGNED = 8
"""Values of 16 bits: rows that are no multiple of it are read in smaller pieces, and padded."""
TILE = 128
"""Rows and columns of the tiles in which large products are computed."""
MOST_PADDING = 0.06
SMALLEST = 1024
"""Width of a model whose time is that of its products: in smaller ones other things take more."""
LONGEST_HEAD = 256
"""What attention in tiles takes."""


@check("sizes for matrix units", About.config)
def tiles(facts: Facts) -> Iterator[Finding]:
    """Sizes on one rank."""
    facts.need_gpus()
    tp, model = facts.dims.tp, facts.config.model
    for key, size in (("model.dim", model.dim), ("model.ffn_dim", share(model.ffn_dim, tp, 0))):
        over = f" / parallel.tp={tp}" if key == "model.ffn_dim" and tp > 1 else ""
        whole = getattr(model, key.partition(".")[2])
        padded = -(-size // TILE) * TILE / size - 1
        said = f"{key}={whole}{over}" + (f" is {size}" if over else "")
        near = TILE * (tp if over else 1)
        better = f"{key}={max(near, round(whole / near) * near)}"
        if size % ALIGNED:
            yield warning(key, f"{said}, no multiple of {ALIGNED}: matrix units are fed slowly", better)
        elif padded > MOST_PADDING and model.dim >= SMALLEST:
            yield note(
                key, f"{said}, and products come in tiles of {TILE}: {padded:.0%} of them is padding", better
            )


@check("width of a head", About.config)
def heads(facts: Facts) -> Iterator[Finding]:
    """Attention in tiles takes some widths only."""
    facts.need_gpus()
    model, width = facts.config.model, facts.config.model.head_dim
    if width % ALIGNED == 0 and width <= LONGEST_HEAD:
        if width < 64 and model.dim >= SMALLEST:
            yield note(
                "model.heads",
                f"a head is {width} wide (model.dim={model.dim} / model.heads={model.heads}): attention reaches half "
                "its speed below 64",
                f"model.heads={model.dim // 64}" if model.dim % 64 == 0 else "fewer heads",
            )
        return
    yield warning(
        "model.heads",
        f"a head is {width} wide (model.dim={model.dim} / model.heads={model.heads}): fast attention takes multiples "
        f"of {ALIGNED} up to {LONGEST_HEAD}, and others keep the square of the sequence in memory",
        "choose model.heads so that a head is 64 or 128 wide",
    )


@check("rows of the vocabulary", About.config)
def vocabulary(facts: Facts) -> Iterator[Finding]:
    """The embedding and the head, cut by tensor parallelism."""
    facts.need_gpus()
    tp, rows = facts.dims.tp, facts.sized.model.vocabulary
    unit = 64 * tp
    if rows % unit == 0:
        return
    better = f"model.vocab_size={-(-rows // unit) * unit}"
    said = (
        f"model.vocab_size={rows} is no multiple of 64 x parallel.tp={tp}"
        if tp > 1
        else f"model.vocab_size={rows} is no multiple of 64"
    )
    if rows % (ALIGNED * tp):
        yield warning(
            "model.vocab_size", f"{said}: the head's products are padded, or ranks have unequal parts", better
        )
    else:
        yield note("model.vocab_size", f"{said}: the last tile of the head's products is not full", better)
