"""Are a run's token files there? Seen from the host that submits, which need not see what compute nodes see."""

import socket
from collections.abc import Iterable
from pathlib import Path


def missing_data(prefixes: Iterable[str]) -> list[str]:
    """Return a sentence for each prefix of token files that this host has no file of."""
    return [
        f"{prefix}.bin is not there, seen from {socket.gethostname()}: the run ends at once if its nodes do not see it"
        for prefix in dict.fromkeys(prefixes)
        if not Path(f"{prefix}.bin").is_file()
    ]
