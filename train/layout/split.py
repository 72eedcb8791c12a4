"""Which layers a pipeline stage gets, so that no stage has much more to do than the others."""

import functools
import itertools
from collections.abc import Sequence

from train.model.config import ModelConfig


def balance(model: ModelConfig, sequence_length: int, stages: int) -> list[int]:
    """Number of layers of each stage, so that the slowest stage is as fast as can be.

    Time is counted in floating-point operations of the forward pass, with the head in the last stage. Among the
    splits that are equally fast the one whose largest stage has fewest parameters is taken: the embedding, which
    computes nothing, weighs there. The first and the last stage may come out without a layer.
    """
    dim, vocabulary = model.dim, model.vocabulary
    matrices = 2 * dim * dim + 2 * model.kv_dim * dim + 3 * model.ffn_dim * dim
    # Per token, as in `flops_per_token`, a third of what training takes.
    layer_flops = 2 * matrices + 4 * dim * sequence_length
    flops = (layer_flops, 0, 2 * vocabulary * dim)
    parameters = (matrices + 2 * dim, vocabulary * dim, vocabulary * dim)
    return partition(model.layers, stages, [flops, parameters])


def partition(layers: int, stages: int, costs: Sequence[tuple[int, int, int]]) -> list[int]:
    """Cut `layers` equal layers into `stages` ranges so that the costliest stage is as cheap as can be.

    Each entry of `costs` is one kind of cost: of a layer, of what the first stage has besides and of what the last
    one has; a later kind decides only between splits that are equal in the earlier ones, and where all are equal the
    earlier stages take fewer layers. Inner stages get one layer at least.
    """
    return list(_best(layers, stages, tuple(costs)))


@functools.cache  # every rank that is looked at asks, in every layout of a search
def _best(layers: int, stages: int, costs: tuple[tuple[int, int, int], ...]) -> tuple[int, ...]:
    assert stages >= 2 and layers >= stages - 2
    inner = stages - 2
    best: tuple[tuple[int, ...], int, int] | None = None
    for first, last in itertools.product(range(layers - inner + 1), repeat=2):
        between = layers - first - last
        if between < inner or (inner == 0 and between):
            continue
        # Equal layers: as even as can be is best for the inner stages, for every kind of cost.
        largest = -(-between // inner) if inner else 0
        worst = tuple(
            max(layer * largest, layer * first + head, layer * last + tail) for layer, head, tail in costs
        )
        best = (worst, first, last) if best is None or worst < best[0] else best
    assert best is not None
    _, first, last = best
    least, more = divmod(layers - first - last, inner) if inner else (0, 0)
    return (first, *[least] * (inner - more), *[least + 1] * more, last)
