"""The most that a trainer does and holds if a model's experts are not used evenly.

A plan has all experts loaded evenly. How uneven a router is nobody knows before the run, but there is a bound: a token
visits as many experts of one rank as that rank has, or as the router chooses. The rank that all tokens go to has as
much to do as one of a model whose router chooses so many times more, and so much is planned again.
"""

from __future__ import annotations

import dataclasses

from slime_launch.errors import Problems
from slime_launch.plan.estimate import Estimate, Premises
from slime_launch.preflight import Found

TRAINERS = ("log-probs", "train")
"""Phases that wait for the rank whose experts have most to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uneven:
    """The trainer, where one rank's experts have ``times`` their share of tokens.

    Attributes:
        memory: Bytes that this rank takes in a step.
        seconds: Of a rollout's passes of the trainer.
    """

    times: float
    memory: int
    seconds: float


def uneven_experts(found: Found, premises: Premises) -> list[Uneven]:
    """With even experts, with one rank that has twice its share, and with one that has all it can have.

    Where all experts are on one rank nothing can be uneven, and there are no rows.
    """
    shape, ranks = found.shape, found.settings.megatron.expert_model_parallel_size
    if shape is None or not found.settings.kind.updates:
        return []
    if not shape.num_experts or not shape.moe_router_topk or ranks == 1:
        return []
    experts, topk = shape.num_experts, shape.moe_router_topk
    shape = dataclasses.replace(shape, moe_router_num_groups=None, moe_router_group_topk=None)  # one may have all
    chosen = sorted({topk, min(2 * topk, experts), min(ranks * topk, experts)})
    rows = []
    for choices in chosen:
        other_shape = dataclasses.replace(shape, moe_router_topk=choices)
        other = Estimate(dataclasses.replace(found, shape=other_shape), premises, Problems())
        seconds = sum(one.seconds for one in other.times if one.phase in TRAINERS)
        if other.trainer is not None and seconds:
            rows.append(Uneven(times=choices / topk, memory=other.trainer.total, seconds=seconds))
    return rows
