"""Finds the weights that engines hold otherwise than the trainer, from the checksums that SGLang computes."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from slime_core.interfaces import NamedTensors
from slime_core.types import WeightUpdate
from slime_rollout.engine import WeightSyncError
from slime_rollout.http import HttpError, call
from slime_rollout.weights.channel import FUSED, PADDED, PADDED_ROWS
from slime_rollout.weights.checkpoint import some, tensor_bytes
from slime_rollout.weights.gpu_checksum import GpuChecksum

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_STACKED = {"gate_proj": ("w13_weight", 0, 2), "up_proj": ("w13_weight", 1, 2), "down_proj": ("w2_weight", 0, 1)}
_LAYER = re.compile(r"\.\d+\.")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Held = Mapping[str, Sequence[Mapping[str, str]]]


@dataclasses.dataclass
class WeightInspector:
    """A weight channel that sends nothing: :meth:`end` compares what is gathered with what engines hold.

    Engines report SHA-256 on a CPU and :class:`GpuChecksum` on CUDA, of weights in their own type; where they report
    something else, they are only compared with each other. A rank of tensor parallelism may hold a weight whole, or its
    share of the rows or the columns.
    """

    engine_urls: Sequence[str]
    tp_size: int
    timeout: float
    key: str | None = None

    def begin(self, update: WeightUpdate) -> None:
        """Ask engines for their type and checksums."""
        self._version = update.version
        with ThreadPoolExecutor(max(1, len(self.engine_urls))) as pool:
            answers = list(pool.map(self._ask, self.engine_urls))
        self._held = dict(zip(self.engine_urls, (ranks for _, ranks in answers), strict=True))
        device, dtype = answers[0][0] if answers else ("cpu", "float32")
        known = device in ("cpu", "cuda") and dtype in _DTYPES
        self._gathered = Gathered(self.tp_size, _DTYPES[dtype], device) if known else None

    def send(self, bucket: NamedTensors) -> int:
        """Compute checksums of tensors; nothing is sent."""
        if self._gathered is not None:
            for name, tensor in bucket:
                self._gathered.add(name, tensor)
        return 0

    def end(self) -> dict[str, str]:
        """`WeightSyncError` if an engine holds other weights than it should, naming them."""
        expected = None if self._gathered is None else self._gathered.expected()
        if problem := find_wrong(self._held, expected):
            raise WeightSyncError(f"weight version {self._version}: {problem}")
        return {}

    def close(self) -> None:
        """Nothing is kept."""

    def _ask(self, url: str) -> tuple[tuple[str, str], list[dict[str, str]]]:
        try:
            info = call("GET", f"{url}/server_info", key=self.key, attempts=3)
            body = {"action": "checksum"}
            answer = call("POST", f"{url}/weights_checker", body, key=self.key, timeout=self.timeout)
            return (str(info["device"]), str(info["dtype"])), [dict(rank["checksums"]) for rank in answer["ranks"]]
        except (HttpError, KeyError, TypeError) as error:
            raise WeightSyncError(f"{url} gives no checksums of its weights: {error}", url=url) from error


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
    """Checksums that an engine may report of what was gathered: by its own names, for each of its ranks."""

    def __init__(self, tp_size: int, dtype: torch.dtype, device: str = "cpu") -> None:
        self._size, self._dtype = tp_size, dtype
        self._new: Callable[[], Sha256 | GpuChecksum] = Sha256 if device == "cpu" else GpuChecksum
        self._digests: dict[str, dict[tuple[int, str], Sha256 | GpuChecksum]] = {}
        self._next: dict[str, int] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor, by its Hugging Face name. Parts of one of the engine's come in order, or it is left out."""
        own, place = engine_place(name)
        if self._next.get(own, 0) != place:
            self._digests.pop(own, None)
            self._next[own] = -1
            return
        self._next[own] = place + 1
        digests = self._digests.setdefault(own, {})
        for kind, part in self._parts(name, tensor.detach().to(self._dtype)):
            digests.setdefault(kind, self._new()).update(part)

    def _parts(self, name: str, tensor: torch.Tensor) -> list[tuple[tuple[int, str], torch.Tensor]]:
        """What ranks may hold of a tensor, by the rank and how it is split."""
        found = [((-1, "whole"), tensor)]
        if name.endswith(PADDED) and len(tensor) % PADDED_ROWS:
            rows = tensor.new_zeros(-len(tensor) % PADDED_ROWS, *tensor.shape[1:])
            tensor = torch.cat([tensor, rows])
            found.append(((-1, "padded"), tensor))
        for dim, kind in enumerate(("rows", "columns")[: tensor.dim()] if self._size > 1 else ()):
            if tensor.shape[dim] % self._size == 0:
                found += [((rank, kind), part) for rank, part in enumerate(tensor.chunk(self._size, dim))]
        return found

    def expected(self) -> list[dict[str, set[str]]]:
        """For each rank, by the engine's names, the checksums that are right."""
        found: list[dict[str, set[str]]] = [{} for _ in range(self._size)]
        for name, digests in self._digests.items():
            for (own, _), digest in digests.items():
                for rank in range(self._size) if own < 0 else (own,):
                    found[rank].setdefault(name, set()).add(digest.hexdigest())
        return found


def engine_place(name: str) -> tuple[str, int]:
    """The engine's tensor that a tensor is a part of, and which part."""
    if expert := _EXPERT.fullmatch(name):
        stacked, place, parts = _STACKED[expert[3]]
        return f"{expert[1]}.{stacked}", int(expert[2]) * parts + place
    *module, part, kind = name.split(".") if name.count(".") else ("", name, "")
    if part not in FUSED or kind not in ("weight", "bias"):
        return name, 0
    fused, names = FUSED[part]
    return ".".join((*module, fused, kind)), names.index(part)


def find_wrong(held: Held, expected: Sequence[Mapping[str, set[str]]] | None) -> str:
    """Which engines hold which weights wrong, in words; nothing if none does.

    Without ``expected`` engines are compared with the first. A kind of weight that is unlike in every layer of every
    engine may only be laid out otherwise there; it is named apart.
    """
    if expected is None:
        first = next(iter(held.values()), [])
        expected = [{name: {text} for name, text in rank.items()} for rank in first]
    wrong = {url: _unlike(ranks, expected) for url, ranks in held.items()}
    compared = {name for ranks in held.values() for rank in ranks for name in rank.keys() & expected[0].keys()}
    kinds: dict[str, set[str]] = {}
    for name in compared:
        kinds.setdefault(_LAYER.sub(".*.", name), set()).add(name)
    everywhere = set.intersection(*map(set, wrong.values())) if wrong else set()
    unsure = sorted(kind for kind, names in kinds.items() if len(names) > 1 and names <= everywhere)
    apart = {name for kind in unsure for name in kinds[kind]}
    lines = [f"{url} holds {some(names)} wrong" for url, found in wrong.items() if (names := sorted({*found} - apart))]
    if unsure:
        lines.append(f"every engine holds {some(unsure)} otherwise, in all layers: wrong, or only laid out otherwise")
    return "; ".join(lines)


def _unlike(ranks: Sequence[Mapping[str, str]], expected: Sequence[Mapping[str, set[str]]]) -> list[str]:
    pairs = zip(ranks, expected, strict=False)
    return sorted({name for rank, right in pairs for name in rank if name in right and rank[name] not in right[name]})
