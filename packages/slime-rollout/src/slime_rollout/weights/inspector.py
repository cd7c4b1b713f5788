"""Finds the weights that engines hold otherwise than the trainer, from the checksums that SGLang computes."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from slime_core.interfaces import NamedTensors
from slime_core.types import WeightUpdate
from slime_rollout.engine import WeightSyncError
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.http import HttpError, call
from slime_rollout.weights.checkpoint import some, tensor_bytes
from slime_rollout.weights.gpu_checksum import GpuChecksum

logger = logging.getLogger(__name__)

# Weights that SGLang holds as one tensor, along the first dimension.
_FUSED = {
    part: (fused, parts)
    for fused, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))
    for part in parts
}
# SGLang pads a vocabulary to a multiple of this.
_PADDED, _PADDED_ROWS = ("embed_tokens.weight", "lm_head.weight"), 64
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_STACKED = {"gate_proj": ("w13_weight", 0, 2), "up_proj": ("w13_weight", 1, 2), "down_proj": ("w2_weight", 0, 1)}
_LAYER = re.compile(r"\.\d+\.")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Held = Mapping[str, Sequence[Mapping[str, str]]]
"""For each engine, and each of its ranks: checksums by the engine's own names."""


class WeightInspector:
    """A weight channel that sends nothing: :meth:`end` compares what is gathered with what engines hold."""

    def __init__(self, spec: ChannelSpec) -> None:
        self.spec = spec

    def begin(self, update: WeightUpdate) -> None:
        """Ask engines for their type and checksums."""
        self._version, urls, key = update.version, self.spec.engine_urls, self.spec.key
        limit = self.spec.sync.update_weight_timeout
        with ThreadPoolExecutor(max(1, len(urls))) as pool:
            found = pool.map(lambda url: engine_checksums(url, timeout=limit, key=key), urls)
            self._held = dict(zip(urls, found, strict=True))
        self._gathered = Gathered.for_engines(urls, self.spec.tp_size, key=key)

    def send(self, bucket: NamedTensors) -> int:
        """Compute checksums of tensors; nothing is sent."""
        self._gathered.add(bucket)
        return 0

    def end(self) -> dict[str, str]:
        """`WeightSyncError` if an engine holds other weights than it should, naming them."""
        if problem := str(find_wrong(self._held, self._gathered.expected(_num_ranks(self._held)))):
            raise WeightSyncError(f"weight version {self._version}: {problem}")
        return {}

    def close(self) -> None:
        """Nothing is kept."""


def engine_checksums(url: str, *, timeout: float, key: str | None = None) -> list[dict[str, str]]:
    """Checksums of what each rank of an engine holds, by the engine's own names; ``timeout`` in seconds."""
    try:
        answer = call("POST", f"{url}/weights_checker", {"action": "checksum"}, key=key, timeout=timeout)
        return [dict(rank["checksums"]) for rank in answer["ranks"]]
    except (HttpError, KeyError, TypeError, ValueError) as error:
        silent = (url,) if isinstance(error, HttpError) and error.timed_out else ()
        raise WeightSyncError(f"{url} gives no checksums of its weights: {error}", url=url, silent=silent) from error


class Sha256:
    """The checksum of engines on a CPU, of a tensor that comes in parts."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def update(self, part: torch.Tensor) -> None:
        """Add the next part."""
        self._digest.update(tensor_bytes(part))

    def hexdigest(self) -> str:
        """16 hexadecimal digits, as the engine reports them."""
        return self._digest.hexdigest()[:16]


class Gathered:
    """Checksums that an engine may report of what was gathered: by its own names, for each of its ranks.

    Engines report SHA-256 on a CPU and :class:`GpuChecksum` on CUDA, of weights in ``dtype``, their own, or in the one
    that a weight has here. A rank of tensor parallelism may hold a weight whole, or its share of the rows or columns.

    Attributes:
        reason: Why nothing of this can be compared with what engines report, if so.
        exact: Whether engines lay out all weights but experts as they are known here: on a GPU, or split, some may not.
        quantizes: Whether engines hold weights of fewer bits than they get.
        skipped: How many quantized tensors were left out, and their scales: engines may lay them out otherwise.
    """

    def __init__(self, tp_size: int, dtype: str, device: str = "cpu") -> None:
        known = device in ("cpu", "cuda") and dtype in _DTYPES
        self.reason = "" if known else f"engines on {device} with weights in {dtype} compute another kind of checksum"
        self.exact, self.quantizes, self.skipped = device == "cpu" and tp_size == 1, False, 0
        self._size, self._dtype = tp_size, _DTYPES.get(dtype, torch.float32)
        self._new: Callable[[], Sha256 | GpuChecksum] = Sha256 if device == "cpu" else GpuChecksum
        self._digests: dict[str, dict[tuple[int, str], Sha256 | GpuChecksum]] = {}
        self._next: dict[str, int] = {}
        self._missing: dict[str, int] = {}

    @classmethod
    def for_engines(cls, urls: Sequence[str], tp_size: int, *, key: str | None = None) -> Gathered:
        """In the way of the first engine, which is asked."""
        if not urls:
            return cls(tp_size, "float32")
        try:
            info = call("GET", f"{urls[0]}/server_info", key=key, attempts=3)
            gathered = cls(tp_size, str(info["dtype"]), str(info["device"]))
            gathered.quantizes = info.get("quantization") is not None
        except (HttpError, KeyError, TypeError) as error:
            text = f"{urls[0]} does not report its device and dtype: {error}"
            raise WeightSyncError(text, url=urls[0]) from error
        return gathered

    def add(self, bucket: NamedTensors) -> None:
        """Add tensors, by their Hugging Face names. Parts of one of the engine's come in order, or it is left out."""
        for name, tensor in bucket if not self.reason else ():
            if tensor.dtype not in _DTYPES.values() or "scale" in name.rpartition(".")[2]:
                self.skipped += 1
                continue
            own, place, count = engine_place(name)
            if count:  # an engine may hold it unfused
                self._digest(name, name, tensor)
            if self._next.get(own, 0) == place:
                self._next[own], self._missing[own] = place + 1, max(0, count - place - 1)
                self._digest(own, name, tensor)
            else:
                self._digests.pop(own, None)
                self._next[own] = -1

    def _digest(self, own: str, name: str, tensor: torch.Tensor) -> None:
        digests = self._digests.setdefault(own, {})
        for dtype in {tensor.dtype, self._dtype}:
            for (rank, kind), part in self._parts(name, tensor.detach().to(dtype)):
                digests.setdefault((rank, f"{kind} {dtype}"), self._new()).update(part)

    def _parts(self, name: str, tensor: torch.Tensor) -> list[tuple[tuple[int, str], torch.Tensor]]:
        """Parts that ranks may hold of a tensor, by the rank and how it is split."""
        found = [((-1, "whole"), tensor)]
        if name.endswith(_PADDED) and len(tensor) % _PADDED_ROWS:
            rows = tensor.new_zeros(-len(tensor) % _PADDED_ROWS, *tensor.shape[1:])
            tensor = torch.cat([tensor, rows])
            found.append(((-1, "padded"), tensor))
        for dim, kind in enumerate(("rows", "columns")[: tensor.dim()] if self._size > 1 else ()):
            if tensor.shape[dim] % self._size == 0:
                found += [((rank, kind), part) for rank, part in enumerate(tensor.chunk(self._size, dim))]
        return found

    def expected(self, ranks: int) -> list[dict[str, set[str]]] | None:
        """For each of an engine's ranks, by its names, the checksums that are right; ``None`` if there is a reason."""
        if not self.reason and ranks % self._size:
            self.reason = f"tensor parallelism over {self._size} does not divide the {ranks} ranks of an engine"
        if self.reason:
            return None
        found: list[dict[str, set[str]]] = [{} for _ in range(self._size)]
        for name, digests in self._digests.items():
            if self._missing.get(name):
                continue
            for (own, _), digest in digests.items():
                for rank in range(self._size) if own < 0 else (own,):
                    found[rank].setdefault(name, set()).add(digest.hexdigest())
        return found * (ranks // self._size)  # stages of a pipeline, each with all ranks of tensor parallelism


def engine_place(name: str) -> tuple[str, int, int]:
    """The engine's tensor that a tensor is a part of, which part, and of how many if it may also be there by itself."""
    if expert := _EXPERT.fullmatch(name):
        stacked, place, parts = _STACKED[expert[3]]
        return f"{expert[1]}.{stacked}", int(expert[2]) * parts + place, 0
    *module, part, kind = name.split(".") if name.count(".") else ("", name, "")
    if part not in _FUSED or kind not in ("weight", "bias"):
        return name, 0, 0
    fused, names = _FUSED[part]
    return ".".join((*module, fused, kind)), names.index(part), len(names)


@dataclasses.dataclass(frozen=True)
class Differences:
    """Weights that engines hold otherwise than expected; without any, its text is empty."""

    compared: set[str]  # names of the weights that were compared
    wrong: Mapping[str, Sequence[str]]  # for each engine that holds wrong weights, their names
    unsure: Sequence[str]  # kinds that are unlike in every layer of every engine, and may only be laid out otherwise

    def __str__(self) -> str:
        lines = [f"{url} holds {some(names)} wrong" for url, names in self.wrong.items()]
        if self.unsure:
            kinds = some(self.unsure)
            lines.append(f"every engine holds {kinds} otherwise, in all layers: wrong, or only laid out otherwise")
        return "; ".join(lines)


def find_wrong(held: Held, expected: Sequence[Mapping[str, set[str]]] | None) -> Differences:
    """Which engines hold which weights wrong; without ``expected`` they are compared with the first."""
    complete = expected is None
    if expected is None:
        expected = [{name: {text} for name, text in rank.items()} for rank in next(iter(held.values()), [])]
    wrong = {url: _unlike(ranks, expected, complete=complete) for url, ranks in held.items()}
    compared = {
        name
        for ranks in held.values()
        for rank, right in zip(ranks, expected, strict=False)
        for name in rank
        if name in right
    }
    kinds: dict[str, set[str]] = {}
    for name in compared:
        kinds.setdefault(_LAYER.sub(".*.", name), set()).add(name)
    everywhere = set.intersection(*map(set, wrong.values())) if wrong else set()
    unsure = sorted(kind for kind, names in kinds.items() if len(names) > 1 and names <= everywhere)
    apart = {name for kind in unsure for name in kinds[kind]}
    sure = {url: names for url, found in wrong.items() if (names := sorted({*found} - apart))}
    return Differences(compared, sure, unsure)


def check_engines(version: int, held: Held, gathered: Gathered) -> None:
    """Compare what engines hold with what was sent, and with each other; a `WeightSyncError` names what differs.

    What may only be laid out otherwise, and what cannot be compared with what was sent, is a warning.
    """
    if not held:
        return
    expected = gathered.expected(_num_ranks(held))
    reason = "engines quantize it" if gathered.quantizes else gathered.reason
    sent = find_wrong(held, None if reason else expected)
    others = find_wrong(held, None)  # also of weights that engines name otherwise
    is_sure = sent.wrong or (gathered.exact and any(".experts." not in kind for kind in sent.unsure))
    found = sent if is_sure else others
    url = next(iter(found.wrong), next(iter(held)))
    problem = str(found) if sent.compared or gathered.skipped else f"{url} holds no weight by a name that was sent"
    if problem:
        raise WeightSyncError(f"weight version {version}: {problem}; send the weights again", url=url)
    reason = reason or (f"{gathered.skipped} quantized tensors or scales" if gathered.skipped else "")
    if reason:
        why = "engines hold the same; not compared with what was sent"
        logger.warning("weight version %d: %s: %s", version, why, reason)
    if sent.unsure:
        logger.warning("weight version %d: %s", version, sent)
    logger.info("weight version %d: %d weights of engines are compared", version, len(sent.compared))


def _num_ranks(held: Held) -> int:
    return len(next(iter(held.values()), []))


def _unlike(
    ranks: Sequence[Mapping[str, str]], expected: Sequence[Mapping[str, set[str]]], *, complete: bool
) -> list[str]:
    """Names of what is held otherwise; with ``complete`` also of what is missing, or not expected."""
    if len(ranks) != len(expected):
        return [f"{len(ranks)} ranks instead of {len(expected)}"]
    found: set[str] = set()
    for rank, right in zip(ranks, expected, strict=True):
        names = rank.keys() | right.keys() if complete else rank.keys() & right.keys()
        found |= {name for name in names if rank.get(name) not in right.get(name, ())}
    return sorted(found)
