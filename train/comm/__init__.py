"""How gradients travel between ranks, where that is not the library's own way."""
