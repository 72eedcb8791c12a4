"""What can be wrong with a checkpoint. Imports no torch."""


class DamagedError(Exception):
    """A checkpoint does not hold what was written; the text is a clause that says where."""


class UnfitError(Exception):
    """A checkpoint is not one of what it is to be loaded into; the message is a clause."""
