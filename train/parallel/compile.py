"""torch.compile, layer by layer."""

import torch

from train.model.llama import Llama


def compile_layers(part: Llama) -> None:
    """Compile each layer; equal layers share the work, and what wraps a layer (ZeRO's hooks) stays outside."""
    # fullgraph: what the compiler cannot follow, and layers that it would compile one by one, raise an error; without
    # it they would only be slow.
    for layer in part.layers.values():
        layer.forward = torch.compile(layer.forward, fullgraph=True)
