"""Writing a file whole or not at all: what was there before stays where there is no room for the new one."""

from pathlib import Path

from contract.errors import ConfigError


def write_whole(path: Path, text: str) -> None:
    """Replace a file; raises `ConfigError` where that fails."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        try:
            fresh.write_text(text)
            fresh.rename(path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
