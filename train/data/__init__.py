"""Training data: token files, how they are made, and how a run reads them."""
