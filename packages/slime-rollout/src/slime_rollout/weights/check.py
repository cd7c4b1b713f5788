"""Whether engines hold what was sent, by checksums that they compute themselves (SGLang's ``/weights_checker``)."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

from slime_core.interfaces import NamedTensors
from slime_rollout.engine import WeightSyncError
from slime_rollout.http import HttpError, call
from slime_rollout.weights.checkpoint import dtype_name, some, tensor_bytes

logger = logging.getLogger(__name__)

# Weights that SGLang holds as one tensor, along the first dimension.
FUSED = {
    part: (fused, parts)
    for fused, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))
    for part in parts
}
# SGLang pads a vocabulary to a multiple of this.
PADDED, PADDED_ROWS = ("embed_tokens.weight", "lm_head.weight"), 64


class SentDigests:
    """SHA-256 of what was sent, under the names that engines use: SGLang's checksum on CPU engines."""

    def __init__(self) -> None:
        self._expected: dict[str, set[str]] = {}
        self._fusing: dict[str, tuple[int, Any]] = {}
        self.dtypes: set[str] = set()

    def add(self, bucket: NamedTensors) -> None:
        """Add some tensors."""
        for name, tensor in bucket:
            self.dtypes.add(dtype_name(tensor.dtype))
            content = tensor_bytes(tensor)
            digest = hashlib.sha256(content)
            self._expected[name] = {_short(digest)}
            if name.endswith(PADDED) and tensor.shape[0] % PADDED_ROWS:
                missing = -tensor.shape[0] % PADDED_ROWS
                digest.update(bytes(missing * len(content) // tensor.shape[0]))
                self._expected[name].add(_short(digest))
            self._fuse(name, content)

    def _fuse(self, name: str, content: memoryview) -> None:
        """Continue a fused tensor, if its parts come in their order."""
        *module, part, kind = name.split(".") if name.count(".") else ("", name, "")
        if part not in FUSED:
            return
        fused, parts = FUSED[part]
        whole = ".".join((*module, fused, kind))
        place, digest = self._fusing.get(whole, (0, hashlib.sha256()))
        if parts[place] != part:
            return
        digest.update(content)
        self._fusing[whole] = (place + 1, digest)
        if place + 1 == len(parts):
            self._expected[whole] = {_short(digest)}
            del self._fusing[whole]

    def compare(self, held: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """Of what was sent: names with the same checksum at an engine, and names with another one there."""
        known = [name for name in held if name in self._expected]
        same = [name for name in known if held[name] in self._expected[name]]
        return same, sorted(set(known) - set(same))


def check_engines(version: int, held: Mapping[str, list[dict[str, str]]], sent: SentDigests, *, tp_size: int) -> None:
    """Compare what all engines hold with each other, and with what was sent.

    The latter only where they report a checksum of it: on CPU (SHA-256; on CUDA it is a kernel of SGLang's), without
    tensor parallelism (a rank holds a part of most tensors), and in the dtype that was sent. Elsewhere engines that all
    hold the same wrong weights are not noticed; a warning says so.

    Args:
        held: Engine → for each of its ranks, checksums by the engine's own names.
    """
    if not held:
        return
    first, expected = next(iter(held.items()))
    for url, ranks in held.items():
        if other := _different(ranks, expected):
            text = f"{url} holds other weights than {first}: {some(other)}; send the weights again"
            raise WeightSyncError(f"weight version {version}: {text}", url=url)
    if reason := _why_not_comparable(first, sent, tp_size):
        logger.warning("weight version %d: engines hold the same; not compared with what was sent: %s", version, reason)
        return
    same, different = sent.compare(expected[0])
    if different or not same:
        wrong = some(different) or "no tensor has a name that was sent"
        text = f"{first} does not hold what was sent: {wrong}; send the weights again"
        raise WeightSyncError(f"weight version {version}: {text}", url=first)
    logger.info("weight version %d: %d tensors of %d engines are what was sent", version, len(same), len(held))


def _why_not_comparable(url: str, sent: SentDigests, tp_size: int) -> str:
    if tp_size > 1:
        return "every rank holds a part"
    try:
        info = call("GET", f"{url}/server_info", attempts=3)
        device, dtype = info["device"], info["dtype"]
    except (HttpError, KeyError, TypeError) as error:
        raise WeightSyncError(f"{url} does not report its device and dtype: {error}", url=url) from error
    if device != "cpu":
        return f"engines on {device} compute another kind of checksum"
    return "" if sent.dtypes == {dtype} else f"{', '.join(sorted(sent.dtypes))} was sent and the engine has {dtype}"


def _different(ranks: list[dict[str, str]], others: list[dict[str, str]]) -> list[str]:
    if len(ranks) != len(others):
        return [f"{len(ranks)} ranks instead of {len(others)}"]
    pairs = zip(ranks, others, strict=True)
    return sorted({name for one, other in pairs for name in one.keys() | other if one.get(name) != other.get(name)})


def _short(digest: Any) -> str:
    return str(digest.hexdigest()[:16])
