"""Which experts a micro-batch's tokens go to: those that a router chooses, or those that were chosen before.

Routing replay: the engine's choices (R3: Ma et al., 2025), or those of the pass that computed the old log-probs (R2:
Zheng et al., 2025, section 5.3), are chosen again. Weights of the chosen experts are the router's own, so it learns.

Notation: T packed tokens of this rank, E experts, K of them for each token, L layers of the model, W = L · K.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime_core.errors import DataError


@dataclass
class Routing:
    """The known experts of a micro-batch on this rank.

    Attributes:
        engine_TW: The engine's, of all layers, int16 on the CPU, with the tokens of all ranks of sequence parallelism;
            -1 where a router is to choose. ``None`` if they are unknown.
        recorded: Those that routers chose [T, K], by layer; used where the engine's are unknown.
        recording: Whether they are to be recorded now.
    """

    engine_TW: torch.Tensor | None = None
    recorded: dict[int, torch.Tensor] = field(default_factory=dict)
    recording: bool = False


class ExpertChoice:
    """A router's choice. It stands where Megatron-core 0.16.1 has one that replays a single micro-batch at a time.

    Layers that are recomputed in the backward pass choose again what they chose in the forward pass. Forward passes of
    several micro-batches may come before the first backward pass, whose order is theirs.

    Attributes:
        made_TK: What was chosen, if it was to be kept.
        counts_2: In training, how many of the given experts the router would not have chosen, and how many were given.
    """

    def __init__(self) -> None:
        self.made_TK: torch.Tensor | None = None
        self.counts_2: torch.Tensor | None = None
        self._given_TK: torch.Tensor | None = None
        self._is_due = self._records = self._trains = False
        self._again: deque[torch.Tensor | None] = deque()

    def begin(self, given_TK: torch.Tensor | None, *, records: bool) -> None:
        """Say what the forward pass that comes next is to choose, and whether it is to keep what it chose."""
        self._given_TK, self._records, self._is_due = given_TK, records, True
        self._trains = torch.is_grad_enabled()
        self.made_TK = None

    def forget(self) -> None:
        """Drop what earlier passes have left, also if they failed."""
        self._again.clear()
        self._is_due = False
        self.counts_2 = None

    def get_replay_topk(
        self,
        scores_TE: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and numbers of each token's experts [T, K]. Megatron's router calls this."""
        assert default_compute_topk is not None
        scores_TK, chosen_TK = default_compute_topk(scores_TE, topk, num_groups=num_groups, group_topk=group_topk)
        counts, given_TK = self._is_due and self._trains, self._next()
        if given_TK is not None:
            if counts:
                self._count(given_TK, chosen_TK)
            chosen_TK = torch.where(given_TK < 0, chosen_TK, given_TK.long())
            scores_TK = scores_TE.gather(1, chosen_TK)
        if self._records:
            self.made_TK = chosen_TK
        return scores_TK, chosen_TK

    def _count(self, given_TK: torch.Tensor, own_TK: torch.Tensor) -> None:
        known_TK = given_TK >= 0
        unlike_TK = known_TK & (given_TK[:, :, None] != own_TK[:, None, :]).all(-1)
        counts_2 = torch.stack([unlike_TK.sum(), known_TK.sum()])
        self.counts_2 = counts_2 if self.counts_2 is None else self.counts_2 + counts_2

    def _next(self) -> torch.Tensor | None:
        if self._is_due:
            self._is_due = False
            if self._trains and not torch.is_grad_enabled():  # a backward pass will come back to this layer
                self._again.append(self._given_TK)
            return self._given_TK
        return self._again.popleft() if self._again else None


def begin(model: Any, routing: Routing | None) -> None:
    """Have the routers of a bare chunk choose as ``routing`` says in its next forward pass.

    Raises:
        DataError: The engine's experts are not those of this model.
    """
    engine_TLK = None
    if routing is not None and routing.engine_TW is not None:
        engine_TLK = _own_rows(routing.engine_TW, model.config)
    for layer, router in _routers(model):
        given_TK = None
        if engine_TLK is not None:
            given_TK = _checked(engine_TLK[:, layer], layer, model.config)
        elif routing is not None and not routing.recording:
            given_TK = routing.recorded.get(layer)
        records = routing is not None and routing.recording
        device = router.weight.device
        router.router_replay.begin(None if given_TK is None else given_TK.to(device), records=records)


def record(model: Any, routing: Routing | None) -> None:
    """Keep what the routers of a bare chunk chose, if that is asked for."""
    if routing is None or not routing.recording:
        return
    for layer, router in _routers(model):
        made_TK = router.router_replay.made_TK
        if made_TK is not None:
            routing.recorded[layer] = made_TK.to("cpu", torch.int16)


def forget(model: Any) -> None:
    """Drop what earlier passes have left in a bare chunk."""
    for _, router in _routers(model):
        router.router_replay.forget()


def changed(models: Sequence[Any]) -> dict[str, float]:
    """The share of choices that replay changed in a step's forward passes, equal on all ranks; all call this.

    Nothing for a model without experts, or where none were given.
    """
    if models[0].config.num_moe_experts is None:
        return {}
    counts_2 = torch.zeros(2, dtype=torch.int64, device=next(models[0].parameters()).device)
    for model in models:
        for _, router in _routers(model):
            if (of_layer := router.router_replay.counts_2) is not None:
                counts_2 += of_layer
    # Ranks of one tensor-parallel group count the same tokens, unless sequence parallelism divides them.
    dist.all_reduce(counts_2)
    unlike, given = counts_2.tolist()
    return {"routing_replay_changed": unlike / given} if given else {}


def _routers(model: Any) -> Iterator[tuple[int, Any]]:
    """The routers, with the number of their layer in the whole model."""
    for layer in model.decoder.layers:
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            yield layer.layer_number - 1, router


def _own_rows(engine_TW: torch.Tensor, config: Any) -> torch.Tensor:
    """The rows of this rank's tokens by layer [T, L, K]."""
    layers, topk = config.num_layers, config.moe_router_topk
    if engine_TW.shape[1] != layers * topk:
        raise DataError(
            f"the engine named {engine_TW.shape[1]} experts for a token, and the model has {layers} layers × {topk}; "
            "give both the same model"
        )
    if config.sequence_parallel:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        engine_TW = engine_TW.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
    return engine_TW.view(-1, layers, topk)


def _checked(rows_TK: torch.Tensor, layer: int, config: Any) -> torch.Tensor:
    """Raise DataError if a row cannot be right: SGLang gives zeros where it recorded nothing."""
    least_T, most_T = rows_TK.aminmax(dim=-1)
    invalid_T = most_T >= config.num_moe_experts
    if config.moe_router_topk > 1:
        invalid_T |= (least_T == most_T) & (least_T >= 0)
    if bool(invalid_T.any()):
        raise DataError(
            f"the engine named the experts {rows_TK[invalid_T][0].tolist()} in layer {layer}, which are not "
            f"{config.moe_router_topk} different ones of {config.num_moe_experts}; take an engine that records them, "
            "or leave out --use-rollout-routing-replay"
        )
    return rows_TK
