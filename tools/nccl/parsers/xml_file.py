"""XML that NCCL dumps: small trees of attributes, read without what a foreign file could do to a parser."""

from pathlib import Path
from xml.etree import ElementTree

from contract.errors import UserError
from tools.nccl.parsers.lines import read_text

_MOST_CHARACTERS = 50_000_000


def root_of(text: str, where: str, name: str) -> ElementTree.Element:
    """Return the root element, which must be called `name`; raises UserError.

    Documents with a DOCTYPE are refused: entities in it can name other files, or grow without bound.
    """
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise UserError(f"{where} declares XML entities, which NCCL never writes: it is not read")
    if len(text) > _MOST_CHARACTERS:
        raise UserError(f"{where} is too large for a dump of NCCL's: give the file of one node")
    try:
        # Of a string the declaration's encoding is not used; a byte order mark may stand before it.
        root = ElementTree.fromstring(text[max(text.find("<"), 0) :])
    except (ElementTree.ParseError, ValueError, LookupError, RecursionError) as error:
        raise UserError(f"{where} is no whole XML file ({error}): dump it again") from error
    if root.tag != name:
        raise UserError(f"{where} has the root <{root.tag}>, NCCL's has <{name}>: give another file")
    return root


def read_root(path: Path, name: str) -> ElementTree.Element:
    """Read a file as `root_of` does; raises UserError."""
    return root_of(read_text(path), str(path), name)


def whole(element: ElementTree.Element, key: str, default: int = 0) -> int:
    """Return a whole number of an attribute, also one in hexadecimal digits with 0x."""
    try:
        value = int(element.get(key, ""), 0)
    except ValueError:
        return default
    return value if abs(value) < 2**63 else default


def real(element: ElementTree.Element, key: str) -> float:
    """Return a finite number of an attribute, 0 where there is none."""
    try:
        value = float(element.get(key, ""))
    except ValueError:
        return 0.0
    return value if abs(value) < 1e18 else 0.0
