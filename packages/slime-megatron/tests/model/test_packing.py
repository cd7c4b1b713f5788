"""Packing sees exactly what each sample alone would see, and computes a shared prompt once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.types import TrainSample, TrainShard, TrainStep
from slime_megatron.model.packing import ContextParallel, MicroBatch, step_positions, target_values, trained_positions


def sample(prompt, response, group=0, index=0, mask=None, **values):
    return TrainSample(
        index=index,
        group_index=group,
        tokens=np.array([*prompt, *response], np.int32),
        response_length=len(response),
        loss_mask=np.array(mask or [1] * len(response), np.uint8),
        trajectory_tokens=sum(mask or [1] * len(response)),
        reward=1.0,
        raw_reward=1.0,
        **{name: np.array(numbers, np.float32) for name, numbers in values.items()},
    )


def visible(batch):
    """For each packed token, itself and the tokens that its attention output is made of, read from the products."""
    tokens = len(batch.tokens_T)
    seen = {}
    for product in batch.attention.products:
        queries, keys = (
            (np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows.numpy()).reshape(product.pieces, -1)
            for rows in (product.query_rows, product.key_rows)
        )
        hidden = np.zeros((*queries.shape, keys.shape[1]), bool)
        if product.hidden_GQW is not None:
            hidden[..., product.seen :] = product.hidden_GQW.numpy()
        for piece, number in np.ndindex(queries.shape):
            if queries[piece, number] < tokens:
                own = keys[piece][~hidden[piece, number]].tolist()
                before = seen.get(queries[piece, number], [])
                assert bool(before) == product.continues
                seen[queries[piece, number]] = own + before
    return [(place, seen[place]) for place in range(tokens)]


TOKENS = st.lists(st.integers(0, 5), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(
    beginning=st.lists(st.integers(0, 5), max_size=8),
    groups=st.lists(st.tuples(TOKENS, st.lists(TOKENS, min_size=1, max_size=4)), min_size=1, max_size=4),
    share=st.booleans(),
    multiple_of=st.sampled_from([1, 4]),
    data=st.data(),
)
def test_every_token_sees_its_own_sample_so_far(beginning, groups, share, multiple_of, data):
    samples = []
    for number, (prompt, responses) in enumerate(groups):
        for response in responses:
            mask = data.draw(st.lists(st.integers(0, 1), min_size=len(response), max_size=len(response)))
            samples.append(sample([*beginning, *prompt], response, number, len(samples), mask))
    micro_batch = MicroBatch(samples, share_prompts="on" if share else "off", multiple_of=multiple_of)
    batch = micro_batch.pack()

    tokens, positions = batch.tokens_T.tolist(), batch.positions_T.tolist()
    assert len(tokens) % multiple_of == 0
    assert batch.computed_tokens <= len(tokens) < batch.computed_tokens + multiple_of
    seen = visible(batch)
    assert batch.computed_pairs == sum(len(keys) for _, keys in seen[: batch.computed_tokens])
    for place in range(batch.computed_tokens):
        query, keys = seen[place]
        assert query == place
        assert [positions[key] for key in keys] == list(range(positions[place] + 1))
    rows, targets = iter(batch.logit_rows_M.tolist()), iter(batch.targets_M.tolist())
    for one, count in zip(micro_batch.samples, micro_batch.target_lengths, strict=True):
        assert count == one.loss_mask.sum()
        for number, kept in enumerate(one.loss_mask):
            if kept:
                end = one.prompt_length + number
                _, keys = seen[next(rows)]
                assert [tokens[key] for key in keys] == one.tokens[:end].tolist()
                assert next(targets) == one.tokens[end]
    assert next(rows, None) is None


@settings(max_examples=60, deadline=None)
@given(
    samples=st.lists(st.tuples(TOKENS, TOKENS), min_size=0, max_size=4),
    size=st.sampled_from([2, 3]),
    multiple_of=st.sampled_from([1, 2]),
    data=st.data(),
)
def test_context_parallel_ranks_have_a_part_of_each_sample(samples, size, multiple_of, data):
    samples = [
        sample(prompt, response, number, number, data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)))
        for number, (prompt, response) in enumerate(samples)
        for n in [len(response)]
    ]
    batches = [
        MicroBatch(samples, share_prompts="off", multiple_of=multiple_of, context=ContextParallel(rank, size)).pack()
        for rank in range(size)
    ]
    assert len({len(batch.tokens_T) for batch in batches}) == 1
    assert len(batches[0].tokens_T) % multiple_of == 0
    tokens, positions = (
        [number for batch in batches for number in getattr(batch, name).tolist()]
        for name in ("tokens_T", "positions_T")
    )
    ends = [(one.prompt_length + number, one) for one in samples for number, kept in enumerate(one.loss_mask) if kept]
    assert sorted(place for batch in batches for place in batch.places_M.tolist()) == list(range(len(ends)))
    assert sum(batch.computed_tokens for batch in batches) == sum(len(one.tokens) - 1 for one in samples) or not samples
    pairs = sum(len(one.tokens) * (len(one.tokens) - 1) // 2 for one in samples)
    assert sum(batch.computed_pairs for batch in batches) == pairs or not samples
    for rank, batch in enumerate(batches):
        assert batch.num_targets == len(ends)
        seen, start = visible(batch), rank * len(batch.tokens_T)
        for place, (query, keys) in enumerate(seen):
            assert query == place and keys[-1] == start + place
            assert [positions[key] for key in keys] == list(range(positions[start + place] + 1))
        given = (batch.places_M, batch.logit_rows_M, batch.targets_M)
        for place, row, target in zip(*(numbers.tolist() for numbers in given), strict=True):
            end, one = ends[place]
            assert target == one.tokens[end]
            assert [tokens[key] for key in seen[row][1]] == one.tokens[:end].tolist()


def test_sharing_computes_a_prompt_once():
    samples = [
        sample([group, *range(39)], range(100, 106), group, group * 8 + member)
        for group in range(16)
        for member in range(8)
    ]
    assert MicroBatch(samples, share_prompts="off").pack().computed_tokens == 16 * 8 * 45
    assert MicroBatch(samples, share_prompts="on").pack().computed_tokens == 16 * (40 + 8 * 5)


@pytest.mark.parametrize(("others", "runs", "lengths"), [((), [3], []), (([6, 7],), [3, 1], [1])])
def test_a_response_of_one_token_is_no_run_of_its_own(others, runs, lengths):
    """It is the target of its prompt's last token, and no input."""
    samples = [sample([1, 2, 3], response) for response in ([4], [5], *others)]
    attention = MicroBatch(samples, share_prompts="on").pack().attention
    assert attention.runs.tolist() == runs
    assert [one.length for one in attention.continuations] == lengths


def test_only_equal_prompts_of_one_group_are_shared():
    other_group = [sample([1, 2], [3] * 20), sample([1, 2], [3] * 20, group=1)]
    other_prompt = [sample([1, 2], [3] * 20), sample([1, 5], [3] * 20)]
    for samples in (other_group, other_prompt):
        assert MicroBatch(samples, share_prompts="on").pack().computed_tokens == 2 * 21


@pytest.mark.parametrize("share", ["on", "auto"])
def test_a_common_beginning_of_all_prompts_is_computed_once(share):
    prompts = [[*range(33), group, *range(6)] for group in range(16)]
    samples = [
        sample(prompts[group], range(6), group, group * 8 + member) for group in range(16) for member in range(8)
    ]
    batch = MicroBatch(samples, share_prompts=share).pack()
    assert batch.computed_tokens == 33 + 16 * (7 + 8 * 5)
    alone = [sample(prompt, [1, 2], group, group) for group, prompt in enumerate(prompts)]
    assert MicroBatch(alone, share_prompts=share).pack().computed_tokens == 33 + 16 * (7 + 1)


def test_auto_shares_where_that_saves_a_tenth():
    long = [sample([1] * 10, [2] * 90, index=index) for index in range(2)]
    short = [sample([1] * 20, [2] * 60, index=index) for index in range(2)]
    assert MicroBatch(long).pack().computed_tokens == 2 * 99
    assert MicroBatch(short).pack().computed_tokens == 20 + 2 * 59


def test_values_go_to_targets_and_back():
    samples = [
        sample([1], [2, 3, 4], mask=[1, 0, 1], rollout_log_probs=[0.5, 9.0, 0.25]),
        sample([1], [5], index=1, rollout_log_probs=[2.0]),
    ]
    batch = MicroBatch(samples, share_prompts="on")
    picked = target_values(batch.samples, "rollout_log_probs")
    torch.testing.assert_close(picked, torch.tensor([0.5, 0.25, 2.0]))
    assert [row.tolist() for row in batch.per_sample(picked)] == [[0.5, 0.0, 0.25], [2.0]]
    assert all(row.dtype == np.float32 for row in batch.per_sample(picked))
    assert target_values(batch.samples, "teacher_log_probs") is None


def test_positions_follow_the_samples_to_their_places():
    """Samples of one prompt are laid out together; positions are those of the shard, or else of the samples given."""
    samples = [sample([1, 2], [3], 0), sample([7, 8, 9], [3], 1), sample([1, 2], [4], 0)]
    batch = MicroBatch(samples, [5, 6, 9], share_prompts="on")
    assert batch.positions == (5, 9, 6)
    assert [one.tokens.tolist() for one in batch.samples] == [[1, 2, 3], [1, 2, 4], [7, 8, 9, 3]]
    assert MicroBatch(samples, share_prompts="on").positions == (0, 2, 1)


def test_samples_are_chosen_by_position():
    samples = [sample([1], [2], index=index, mask=[int(index != 1)]) for index in range(4)]
    step = TrainStep(micro_batches=[[0, 1], [1], [], [2, 3]], global_trajectories=4, global_tokens=3)
    shard = TrainShard.of(rollout_id=0, temperature=1.0, samples=samples, steps=[step])
    assert trained_positions(shard) == [0, 2, 3]
    assert step_positions(shard, {0, 3}) == [[[0], [3]]]


def with_kept(sets, *args, **kwargs):
    made = sample(*args, **kwargs)
    made.extras.update(
        kept_ids=np.array([one for kept in sets for one in kept], np.int32),
        kept_counts=np.array([len(kept) for kept in sets], np.int32),
    )
    return made


@pytest.mark.parametrize("size", [1, 2])
def test_kept_tokens_lie_at_their_targets(size):
    samples = [
        with_kept([[2, 7], [], [4]], [1], [2, 3, 4], mask=[1, 0, 1]),
        with_kept([[5, 6, 8], [9]], [1], [5, 9], index=1),
        sample([1], [3], index=2, mask=[0]),
    ]
    expected = {(2, (2, 7)), (4, (4,)), (5, (5, 6, 8)), (9, (9,))}
    found = []
    for rank in range(size):
        batch = MicroBatch(samples, share_prompts="on", context=ContextParallel(rank, size)).pack()
        ids = torch.split(batch.kept.ids, batch.kept.counts.tolist())
        found += [(target, tuple(kept.tolist())) for target, kept in zip(batch.targets_M.tolist(), ids, strict=True)]
    assert len(found) == 4
    assert set(found) == expected


def test_all_samples_have_kept_tokens_or_none_has():
    mixed = [with_kept([[2]], [1], [2]), sample([1], [3], index=1)]
    with pytest.raises(DataError, match="sample 1 has no kept tokens, and others of its micro-batch have"):
        MicroBatch(mixed, share_prompts="on").pack()
    assert MicroBatch(mixed[1:], share_prompts="on").pack().kept is None


@pytest.mark.parametrize("multiple_of", [1, 2])
def test_a_filler_computes_one_token_and_trains_none(multiple_of):
    batch = MicroBatch([], share_prompts="on", multiple_of=multiple_of).pack()
    assert (len(batch.tokens_T), batch.computed_tokens, len(batch.targets_M)) == (multiple_of, 1, 0)
    assert batch.computed_pairs == 1
    assert visible(batch)[0] == (0, [0])


@pytest.mark.parametrize("broken", [[sample([], [1])], [sample([1], [])]])
def test_what_cannot_be_trained_on_is_refused(broken):
    with pytest.raises(DataError):
        MicroBatch(broken, share_prompts="on")
