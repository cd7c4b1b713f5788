import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.interfaces import DataSource
from slime_rollout.data import PromptDataset, PromptRow, RolloutDataSource, TokenizedPrompt


def dataset(size, weights=None):
    if weights is not None:
        parts = [dataset(size), dataset(size + 2)]
        return PromptDataset.join(parts, weights)
    return PromptDataset(
        TokenizedPrompt(row=PromptRow(where="", prompt=f"p{place}", label=str(place)), tokens=[place, place + 1])
        for place in range(size)
    )


def source(size=5, samples=2, shuffle=True, seed=42, weights=None):
    return RolloutDataSource(dataset(size, weights), samples_per_prompt=samples, shuffle=shuffle, seed=seed)


def prompts(groups):
    return [group[0].prompt for group in groups]


def test_is_a_data_source():
    assert isinstance(source(), DataSource)


def test_numbers_count_on_and_groups_have_their_size():
    groups = source(samples=3).get_samples(4)
    assert [[sample.index for sample in group] for group in groups] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert [{sample.group_index for sample in group} for group in groups] == [{0}, {1}, {2}, {3}]
    assert all(len({sample.prompt for sample in group}) == 1 for group in groups)


def test_without_shuffle_the_files_order_repeats():
    assert prompts(source(size=3, shuffle=False).get_samples(7)) == ["p0", "p1", "p2", "p0", "p1", "p2", "p0"]


def test_a_batch_may_hold_several_epochs_each_shuffled_anew():
    order = prompts(source(size=20).get_samples(60))
    epochs = [order[:20], order[20:40], order[40:]]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 20 for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, [f"p{place}" for place in range(20)]]}) == 4


def test_the_shuffle_is_a_fact_of_its_seed():
    first = prompts(source(size=6, seed=42).get_samples(6))
    assert first == ["p1", "p0", "p3", "p2", "p5", "p4"]  # written down: must not change between versions
    assert prompts(source(size=6, seed=43).get_samples(6)) != first


def test_groups_given_back_come_first_as_they_are():
    given = source()
    first, second, third = given.get_samples(3)
    first[0].metadata["partial"] = True
    given.add_samples([second, first])
    again = given.get_samples(3)
    assert again[0] is second
    assert again[1] is first
    assert again[2][0].group_index == third[0].group_index + 1


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 7),
    samples=st.integers(1, 3),
    shuffle=st.booleans(),
    weights=st.none() | st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)),
    batches=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=8),
    data=st.data(),
)
def test_stopping_anywhere_and_continuing_equals_never_stopping(size, samples, shuffle, weights, batches, data):
    stop = data.draw(st.integers(0, len(batches)))

    def run(given, some):
        seen = []
        for take, give_back in some:
            groups = given.get_samples(take)
            seen += copy.deepcopy([[sample.to_dict() for sample in group] for group in groups])
            for group in groups[:give_back]:
                group[0].metadata["tries"] = group[0].metadata.get("tries", 0) + 1
            given.add_samples(groups[:give_back])
        return seen

    uninterrupted = run(source(size, samples, shuffle, weights=weights), batches)
    before = source(size, samples, shuffle, weights=weights)
    seen = run(before, batches[:stop])
    state = json.loads(json.dumps(before.state_dict()))
    run(before, batches)  # what the old object does afterwards must not matter
    after = source(size, samples, shuffle, weights=weights)
    after.load_state_dict(state)
    assert seen + run(after, batches[stop:]) == uninterrupted


def test_a_state_shares_nothing_with_its_source():
    given = source()
    groups = given.get_samples(1)
    given.add_samples(groups)
    state = given.state_dict()
    groups[0][0].tokens.append(99)
    assert 99 not in state["buffer"][0][0]["tokens"]
    given.load_state_dict(state)
    given.get_samples(1)[0][0].tokens.append(98)
    assert 98 not in state["buffer"][0][0]["tokens"]


@pytest.mark.parametrize(
    ("other", "words"),
    [({"size": 6}, "prompts 5 → 6"), ({"seed": 7}, "seed 42 → 7"), ({"shuffle": False}, "shuffle True → False")],
)
def test_a_state_of_other_data_is_refused(other, words):
    given = source(**other)
    with pytest.raises(DataError, match=words):
        given.load_state_dict(source().state_dict())
