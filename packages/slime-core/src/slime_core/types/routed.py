"""The experts that an engine's routers chose for each token.

As text, so that a sample stays what JSON holds: ``<W>x<B>:<base64>``. W numbers for each token, layer by layer, are
unsigned, little-endian and of B bytes. Layers without experts have numbers, too, which say nothing.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import TYPE_CHECKING, Any

from slime_core.errors import DataError

if TYPE_CHECKING:
    from numpy import unsignedinteger
    from numpy.typing import NDArray

EXPERTS = 2**16
"""Numbers of experts are below."""

_HEAD = re.compile(r"([1-9]\d{0,5})x([12]):")
_FORM = "text such as '16x1:AAEC…' (slime_core.types.routed)"


def routed_text(rows_TW: NDArray[Any]) -> str:
    """The rows of T tokens as text. Numbers are 0 or more, and below :data:`EXPERTS`."""
    import numpy as np

    size = 1 if not rows_TW.size or rows_TW.max() < 256 else 2
    data = np.ascontiguousarray(rows_TW, f"<u{size}").tobytes()
    return f"{rows_TW.shape[1]}x{size}:{base64.b64encode(data).decode()}"


def routed_rows(where: str, text: str) -> NDArray[unsignedinteger[Any]]:
    """The reverse of :func:`routed_text`: T × W. Raises DataError if it is something else."""
    import numpy as np

    width, size = _head(where, text)
    try:
        data = base64.b64decode(text[text.index(":") + 1 :], validate=True)
    except binascii.Error as error:
        raise DataError(f"{where}: routed_experts is not {_FORM}: {error}") from None
    if len(data) % (width * size):
        raise DataError(f"{where}: routed_experts has {len(data)} bytes, and a token has {width * size}")
    return np.frombuffer(data, f"<u{size}").reshape(-1, width)


def count_routed(where: str, text: Any) -> int:
    """Of how many tokens it is, without reading them all. Raises DataError if it cannot be such text."""
    width, size = _head(where, text)
    count: int
    coded = len(text) - text.index(":") - 1
    count, rest = divmod(coded // 4 * 3 - text[-2:].count("="), width * size)
    if coded % 4 or rest:
        raise DataError(f"{where}: routed_experts is cut off; it must be {_FORM}")
    return count


def is_routed(text: str, most: int) -> bool:
    """Whether it may be the text of so many tokens, or fewer."""
    try:
        return count_routed("", text) <= most
    except DataError:
        return False


def _head(where: str, text: Any) -> tuple[int, int]:
    """W and B."""
    found = _HEAD.match(text) if isinstance(text, str) else None
    if found is None:
        given = repr(text[:40]) if isinstance(text, str) else type(text).__name__
        raise DataError(f"{where}: routed_experts must be {_FORM}, got {given}")
    return int(found[1]), int(found[2])
