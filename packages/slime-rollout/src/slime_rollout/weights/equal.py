"""Whether engines hold what was sent, by checksums that they compute themselves (SGLang's ``/weights_checker``).

Engines of the same size must hold the same weights, bit for bit: this is compared on every device. What was sent is
compared with what they hold where both can be told:

- on CPU engines. There SGLang's checksum is a SHA-256 of a tensor's bytes; on CUDA it is a Triton kernel's.
- without tensor parallelism, since a rank holds a part of most tensors;
- where the engine computes in the dtype that was sent;
- for tensors that it holds under the same name, or joined with others along the first dimension, as ``qkv_proj`` and
  ``gate_up_proj`` are, or with rows of zeros added, as embeddings are.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import torch

from slime_core.interfaces import NamedTensors
from slime_rollout.engine.errors import WeightSyncError
from slime_rollout.http import HttpError, call
from slime_rollout.weights.control import Engines

logger = logging.getLogger(__name__)

JOINED = {
    "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "k_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "v_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "gate_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
    "up_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
}
# SGLang pads a vocabulary to a multiple of this.
PADDED, PADDED_ROWS = ("embed_tokens.weight", "lm_head.weight"), 64
_SHOWN = 5


class SentDigests:
    """SHA-256 of what was sent, under the names that engines use."""

    def __init__(self) -> None:
        self._found: dict[str, set[str]] = {}
        self._joining: dict[str, tuple[int, Any]] = {}
        self.dtypes: set[torch.dtype] = set()

    def add(self, bucket: NamedTensors) -> None:
        """Take note of some tensors."""
        for name, tensor in bucket:
            self.dtypes.add(tensor.dtype)
            content = _bytes(tensor)
            digest = hashlib.sha256(content)
            self._found[name] = {_short(digest)}
            if name.endswith(PADDED) and tensor.shape[0] % PADDED_ROWS:
                missing = -tensor.shape[0] % PADDED_ROWS
                digest.update(bytes(missing * len(content) // tensor.shape[0]))
                self._found[name].add(_short(digest))
            self._join(name, content)

    def _join(self, name: str, content: memoryview) -> None:
        """Go on with a joined tensor, if its parts come in their order."""
        *module, part, kind = name.split(".") if name.count(".") else ("", name, "")
        if part not in JOINED:
            return
        joined, parts = JOINED[part]
        whole = ".".join((*module, joined, kind))
        place, digest = self._joining.get(whole, (0, hashlib.sha256()))
        if parts[place] != part:
            return
        digest.update(content)
        self._joining[whole] = (place + 1, digest)
        if place + 1 == len(parts):
            self._found[whole] = {_short(digest)}
            del self._joining[whole]

    def differing(self, held: dict[str, str]) -> tuple[list[str], list[str]]:
        """Compare with what an engine holds.

        Args:
            held: The engine's name → its checksum.

        Returns:
            Names whose checksums are the same, and names whose are not. Names that were not sent are in neither.
        """
        known = [name for name in held if name in self._found]
        same = [name for name in known if held[name] in self._found[name]]
        return same, sorted(set(known) - set(same))


def check_equal(update: Engines, sent: SentDigests, *, tp_size: int) -> None:
    """Compare all engines with each other, and with what was sent.

    Raises:
        WeightSyncError: Naming an engine, and tensors that differ.
    """
    if not update.urls:
        return
    held = update.on_all(lambda url: engine_checksums(update, url))
    for url, ranks in zip(update.urls, held, strict=True):
        if other := _different(ranks, held[0]):
            raise WeightSyncError(
                f"weight version {update.version}: {url} holds other weights than {update.urls[0]}: {_some(other)}; "
                "send the weights again",
                url=url,
            )
    url = update.urls[0]
    if (reason := _why_not_comparable(url, sent, tp_size)) is not None:
        logger.info("weight version %d: all engines hold the same; with what was sent: %s", update.version, reason)
        return
    same, different = sent.differing(held[0][0])
    if different or not same:
        raise WeightSyncError(
            f"weight version {update.version}: {url} does not hold what was sent: "
            f"{_some(different) or 'no tensor has a name that was sent'}; send the weights again",
            url=url,
        )
    logger.info("weight version %d: %d tensors of %d engines are what was sent", update.version, len(same), len(held))


def engine_checksums(update: Engines, url: str) -> list[dict[str, str]]:
    """Checksums of what an engine holds, by its own names, for each of its ranks.

    Raises:
        WeightSyncError: It gives none.
    """
    answer = update.post(url, "/weights_checker", {"action": "checksum"}, is_long=True)
    try:
        return [dict(rank["checksums"]) for rank in answer["ranks"]]
    except (KeyError, TypeError) as error:
        raise WeightSyncError(f"{url}/weights_checker gives no checksums: {str(answer)[:200]}", url=url) from error


def _why_not_comparable(url: str, sent: SentDigests, tp_size: int) -> str | None:
    if tp_size > 1:
        return "not compared, every rank holds a part"
    try:
        info = call("GET", f"{url}/server_info", attempts=3)
        device, dtype = info["device"], info["dtype"]
    except (HttpError, KeyError, TypeError) as error:
        raise WeightSyncError(f"{url} does not tell its device and dtype: {error}", url=url) from error
    if device != "cpu":
        return f"not compared, engines on {device} have checksums of another kind"
    names = {str(each).removeprefix("torch.") for each in sent.dtypes}
    if names != {dtype}:
        return f"not compared, {', '.join(sorted(names))} was sent and the engine has {dtype}"
    return None


def _different(ranks: list[dict[str, str]], others: list[dict[str, str]]) -> list[str]:
    if len(ranks) != len(others):
        return [f"{len(ranks)} ranks instead of {len(others)}"]
    pairs = zip(ranks, others, strict=True)
    return sorted({name for one, other in pairs for name in one.keys() | other if one.get(name) != other.get(name)})


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data


def _short(digest: Any) -> str:
    return str(digest.hexdigest()[:16])
