"""Which ranks and engines are on which node, and how a rollout's samples are shared out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from slime_core.errors import ConfigError
from slime_launch.config import ClusterConfig, Settings
from slime_launch.derived import global_batch_size, row_limit
from slime_launch.devices import DeviceSpec
from slime_launch.errors import PlacementError
from slime_launch.placement import BundleLayout, check_transport
from slime_launch.plan.cost import Sizes
from slime_launch.plan.engines import EngineGroup
from slime_rollout.engine import EngineConfig, Route


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """One node: numbers of its trainer ranks, and its engines."""

    node: int
    trainer_ranks: list[int]
    engines: list[PlacedEngine]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedEngine:
    """An engine on a node: its number, its model and role, if not all are alike, and its GPUs there."""

    number: int
    title: str
    gpus: list[int]


def place(layout: BundleLayout, gpus_per_node: int, groups: Sequence[EngineGroup]) -> list[Node]:
    """Fill nodes one after the other, as the run's placement group does; a CPU's workers are on one."""
    of_node = gpus_per_node if layout.cuda else len(layout.bundles)
    nodes: dict[int, Node] = {}

    def at(bundle: int) -> Node:
        number = bundle // of_node
        return nodes.setdefault(number, Node(node=number, trainer_ranks=[], engines=[]))

    for rank, bundle in enumerate(layout.trainer):
        at(bundle).trainer_ranks.append(rank)
    engines = sorted((first, group.title, group.ranks) for group in groups for first in group.first_gpus)
    for number, (first, title, ranks) in enumerate(engines):
        for bundle in layout.rollout[first : first + ranks]:
            here = at(bundle).engines
            if not here or here[-1].number != number:
                here.append(PlacedEngine(number=number, title=title, gpus=[]))
            here[-1].gpus.append(bundle % of_node)
    return [nodes[number] for number in sorted(nodes)]


def check_nodes(
    nodes: list[Node], engine: EngineConfig, cluster: ClusterConfig, device: DeviceSpec, *, trains: bool
) -> None:
    """Check that every engine has as many GPUs on each of its nodes, and that weights reach it if the run ``trains``.

    Raises:
        PlacementError: One has not, or the transport of weights does not reach all.
    """
    shares: dict[int, list[int]] = {}
    for node in nodes:
        for placed in node.engines:
            shares.setdefault(placed.number, []).append(len(placed.gpus))
    uneven = next((number for number, share in shares.items() if len(set(share)) > 1), None)
    if uneven is not None:
        raise PlacementError(
            f"engine {uneven} gets {' + '.join(str(number) for number in shares[uneven])} GPUs on "
            f"{len(shares[uneven])} nodes, and needs as many on each; give another --rollout-num-gpus-per-engine, or "
            "trainers a multiple of it"
        )
    if shares and trains:
        check_transport(engine, route_of(cluster, nodes, device, 0))


def route_of(
    cluster: ClusterConfig, nodes: list[Node], device: DeviceSpec, size: int, *, engines: int = 1, tensors: int = 0
) -> Route:
    """The way of ``size`` bytes of weights, in so many tensors, to so many engines."""
    places, grows = [node for node in nodes if node.engines], cluster.spare_gpus > 0
    parts = [engine.number for node in places for engine in node.engines]
    beside = len(parts) == len(set(parts)) and all(node.trainer_ranks for node in places)
    return Route(
        engines=engines,
        within_node=all(node.node == 0 for node in places) and not grows,
        cuda=not device.is_cpu,
        shared=cluster.colocate,
        senders=len(places) if beside else 0,
        size=size,
        tensors=tensors,
        link=device.link,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """How a rollout is trained on; ``identity`` says it as the two products that must be equal."""

    prompts: int
    samples_per_prompt: int
    samples: int
    steps_per_rollout: int
    global_batch_size: int
    data_parallel_size: int
    samples_per_rank: int
    tokens_per_micro_batch: int
    micro_batches_per_step: int
    identity: str


def batch_of(settings: Settings, sizes: Sizes) -> BatchSizes:
    """The batch, with micro-batches of responses that are as long as they may be.

    Raises:
        ConfigError: The sizes do not fit each other.
    """
    megatron, selection = settings.megatron, settings.rollout.selection
    steps, size = settings.run.num_steps_per_rollout, global_batch_size(settings)
    ranks = megatron.data_parallel_size(settings.cluster.actor_gpus)
    own = math.ceil(size / ranks)
    together = 2 if settings.algorithm.on_pairs else 1  # samples that are in one micro-batch whatever the limit
    if megatron.use_dynamic_batch_size and megatron.max_tokens_per_gpu:
        tokens = max(megatron.max_tokens_per_gpu * megatron.context_parallel_size, together * sizes.sample_tokens)
        tokens = min(tokens, own * sizes.sample_tokens)
        count = math.ceil(own / max(1, tokens // sizes.sample_tokens))
    else:
        micro = max(megatron.micro_batch_size, together)
        tokens = min(micro, own) * sizes.sample_tokens
        count = math.ceil(own / micro)
    prompts, each = selection.rollout_batch_size, settings.samples_per_prompt
    return BatchSizes(
        prompts=prompts,
        samples_per_prompt=each,
        samples=prompts * each,
        steps_per_rollout=steps,
        global_batch_size=size,
        data_parallel_size=ranks,
        samples_per_rank=own,
        tokens_per_micro_batch=tokens,
        micro_batches_per_step=count,
        identity=f"{prompts} {settings.kind.rows or 'prompts'} × {each} samples = {prompts * each} = {steps} steps × "
        f"global batch {size}",
    )


def sizes_of(settings: Settings, prompt_tokens: int, context: int, longest_row: int | None = None) -> Sizes:
    """A rollout whose responses are as long as they may be, after prompts of so many tokens.

    Rows of a data set are as long as the longest, their prompt included; as they may be, where that is not known.

    Raises:
        ConfigError: Prompts leave no room for a response.
    """
    prompts, limit = settings.rollout.selection.rollout_batch_size, row_limit(settings.rollout, context)
    samples = prompts * settings.samples_per_prompt
    if settings.kind.rows is not None:
        return Sizes(prompt_tokens=0, response_tokens=longest_row or limit, prompts=prompts, samples=samples)
    response = min(settings.rollout.sampling.rollout_max_response_len, limit - prompt_tokens)
    if response < 1:
        raise ConfigError(
            f"a prompt of {prompt_tokens} tokens leaves no room for a response within {limit}; give a larger "
            "--rollout-max-context-len, or leave long prompts out with --rollout-max-prompt-len"
        )
    return Sizes(prompt_tokens=prompt_tokens, response_tokens=response, prompts=prompts, samples=samples)
