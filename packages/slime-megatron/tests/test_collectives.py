"""Ranks speak alike whatever they have to train on: each process group's calls are the same on all of its members."""

import collections

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_core.config import AlgorithmConfig
from slime_core.schedule import ShardSpec, build_shards
from slime_core.types import RolloutBatch, Sample, Status
from support.layouts import DO, EP2, PP2

LAYOUTS = {
    "dp2": ("qwen3", 2, DO, AlgorithmConfig()),
    "ep2": ("qwen3-moe", 2, EP2, AlgorithmConfig()),
    "pp2, dp2": ("qwen3", 4, PP2, AlgorithmConfig(calculate_per_token_loss=True)),
}
EXPECTED = {
    "dp2": {"allreduce_", "reduce_scatter_tensor_coalesced_", "allgather_into_tensor_coalesced_"},
    "ep2": {"allreduce_", "allgather_", "allreduce_coalesced_"},
    "pp2, dp2": {"allreduce_", "broadcast_", "send", "recv_"},
}
"""Among the calls: those of gradients, of a distributed optimizer's weights, of experts, of a stage's results."""
PER_GROUP = 2


@st.composite
def rollouts(draw):
    """Four groups of two: lengths, masks, rewards that may be alike, aborted and removed samples."""
    groups = []
    for number in range(4):
        prompt, group = draw(st.integers(1, 12)), []
        for member in range(PER_GROUP):
            length = draw(st.integers(0, 20) | st.just(1))
            mask = draw(st.none() | st.lists(st.integers(0, 1), min_size=length, max_size=length))
            group.append(
                Sample(
                    index=number * PER_GROUP + member,
                    group_index=number,
                    prompt="",
                    tokens=[(7 * number + place) % 500 for place in range(prompt + length)],
                    response_length=length,
                    loss_mask=mask,
                    reward=float(draw(st.booleans())),
                    rollout_log_probs=[-1.0] * length,
                    status=draw(st.sampled_from([Status.COMPLETED, Status.COMPLETED, Status.TRUNCATED, Status.FAILED])),
                    remove_sample=draw(st.integers(0, 5)) == 0,
                )
            )
        groups.append(group)
    return RolloutBatch(rollout_id=0, groups=groups)


HOW = st.fixed_dictionaries(
    {
        "drop_untrained": st.booleans(),
        "global_batch_size": st.sampled_from([4, 8]),
        "max_tokens_per_gpu": st.sampled_from([8, 40, 400]),
        "use_dynamic_batch_size": st.booleans(),
    }
)


def assert_alike(layout, ranks, tiny_model, tiny_config, examples):
    name, world, values, algorithm = LAYOUTS[layout]
    model = tiny_model(name)
    config = tiny_config(load=model.checkpoint, **values)
    ranks.start(world, config, model.shape, algorithm)
    seen = set()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
        database=None,
    )
    @given(batch=rollouts(), how=HOW)
    def try_one(batch, how):
        shards = build_shards(
            batch,
            ShardSpec(
                algorithm=algorithm,
                temperature=1.0,
                data_parallel_size=config.data_parallel_size(world),
                micro_batch_size=2,
                **how,
            ),
        )
        said = ranks.call("train_and_record_collectives", shards)
        collective, sent, received = collections.defaultdict(dict), {}, {}
        for rank, groups in enumerate(said):
            for (group, *members), calls in groups.items():
                shared = [call for call in calls if call[0] not in ("send", "recv_")]
                collective[group, *members][rank] = shared
                for kind, peer, numbers in (call for call in calls if call[0] in ("send", "recv_")):
                    other = members[peer]
                    if kind == "send":
                        sent.setdefault((rank, other), []).append(numbers)
                    else:
                        received.setdefault((other, rank), []).append(numbers)
        assert sent == received
        seen.update(call[0] for groups in said for calls in groups.values() for call in calls)
        for (group, *members), calls in collective.items():
            assert sorted(calls) == members or not any(calls.values()), f"group {group} of {members}: {sorted(calls)}"
            first = next(iter(calls.values()))
            assert all(other == first for other in calls.values()), f"group {group} of ranks {members}"

    try_one()
    assert seen >= EXPECTED[layout], seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_makes_the_same_calls_whatever_it_has_to_train_on(ranks, tiny_model, tiny_config, layout):
    assert_alike(layout, ranks, tiny_model, tiny_config, 8)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_do_in_many_rollouts(ranks, tiny_model, tiny_config, layout):
    assert_alike(layout, ranks, tiny_model, tiny_config, 100)
