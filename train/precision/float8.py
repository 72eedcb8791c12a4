"""Products of the layers in 8 bits, by torchao (Micikevicius et al. 2022, arXiv 2209.05433)."""

from torch import nn

from contract.errors import ConfigError

TILE = 16
"""The sizes of a product in 8 bits are multiples of this."""


def use_float8(layers: nn.ModuleDict) -> None:
    """Exchange the linear modules of `layers`, in place; names of parameters stay.

    Those of other sizes than GPUs multiply in 8 bits stay as they are.
    """
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError as error:
        raise ConfigError(
            f"precision.float8 is done by torchao, which cannot be imported ({error}): pip install torchao"
        ) from error
    convert_to_float8_training(layers, module_filter_fn=_divides)


def _divides(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and module.in_features % TILE == module.out_features % TILE == 0
