"""A weight channel before it is opened: its settings, and which trainer rank sends to which engine."""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pkgutil import resolve_name

from slime_core.interfaces import WeightChannel
from slime_rollout.engine import WeightSyncError
from slime_rollout.engine.addresses import is_this_machine
from slime_rollout.engine.sglang_flags import engine_device
from slime_rollout.engine.transports import Route, WeightSyncConfig, chosen_of, names, ways_of


@dataclasses.dataclass(frozen=True)
class ChannelSpec:
    """All that a weight channel is told: the one argument of its class. It needs no torch, and crosses processes.

    Attributes:
        engine_urls: The engines themselves, not the router, which forwards no control requests.
        tp_size: Tensor parallel size of each engine.
        hf_checkpoint: The checkpoint that engines were started with. If it is in safetensors, tensors must have its
            shapes: not every engine would survive another one.
        receivers: Addresses of what applies updates next to engines, one for each engine or one for all.
        colocate: Whether trainer and engines share their GPUs.
        key: The one that engines ask for, if they do.
    """

    engine_urls: tuple[str, ...]
    _: dataclasses.KW_ONLY
    sync: WeightSyncConfig = dataclasses.field(default_factory=WeightSyncConfig)
    tp_size: int = 1
    hf_checkpoint: str = ""
    receivers: tuple[str, ...] = ()
    colocate: bool = False
    key: str | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "engine_urls", tuple(url.rstrip("/") for url in self.engine_urls))
        object.__setattr__(self, "receivers", tuple(self.receivers))

    def inspector(self) -> WeightChannel:
        """The channel that compares the engines' weights with those that it is given, and sends nothing."""
        channel: WeightChannel = resolve_name("slime_rollout.weights.inspector:WeightInspector")(self)
        return channel

    def open(self) -> WeightChannel:
        """Make the sending end that the flags choose, in the process that sends. It connects in ``begin``.

        Raises `ConfigError` on NCCL without CUDA, and `WeightSyncError` on deltas without a receiver.
        """
        if (row := self.sync.transport) is not None:
            channel: WeightChannel = resolve_name(row.channel)(self)
            return channel
        # Engines that somebody else has started; a run says how its own are reached.
        here, cuda = all(is_this_machine(url) for url in self.engine_urls), engine_device() == "cuda"
        route = Route(engines=len(self.engine_urls), within_node=here, cuda=cuda, shared=self.colocate)
        fastest = chosen_of(ways_of(self.sync, route)).name
        return dataclasses.replace(self, sync=self.sync.adapted(update_weight_transport=fastest)).open()

    def by_rank(
        self, nodes: Sequence[str | None], addresses: Callable[[], Mapping[str, str]]
    ) -> dict[int, ChannelSpec]:
        """Which trainer ranks send, and what the channel of each one is told.

        Args:
            nodes: Each rank's node.
            addresses: Gives each node's address; called only if there are several.

        Raises:
            WeightSyncError: An engine takes weights only from a trainer rank of its own node, which has none.
        """
        row = self.sync.transport
        if row is None or not row.within_machine or len(set(nodes)) == 1:
            return {0: self}
        hosts = addresses()
        ranks = {hosts.get(node or ""): nodes.index(node) for node in nodes}
        urls: dict[int, list[str]] = {}
        for url in self.engine_urls:
            if (rank := ranks.get(urllib.parse.urlsplit(url).hostname)) is None:
                raise WeightSyncError(f"no trainer rank is on the node of {url}, and shares memory with it", url=url)
            urls.setdefault(rank, []).append(url)
        return {rank: dataclasses.replace(self, engine_urls=tuple(own)) for rank, own in sorted(urls.items())}


def require_this_machine(urls: Iterable[str]) -> None:
    """Raise `WeightSyncError` if an engine runs elsewhere, and does not see this machine's shared memory and files."""
    if far := [url for url in urls if not is_this_machine(url)]:
        *some, last = names(lambda row: not row.within_machine)
        raise WeightSyncError(
            f"weights were to go through this machine's shared memory, or a checkpoint on it, and {', '.join(far)} run "
            f"elsewhere; run them here, or give --update-weight-transport {', '.join(some)}, or {last}, and "
            "--update-weight-receivers for deltas"
        )
