import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.interfaces import DataSource
from slime_core.types import Sample, Status
from slime_rollout.data import CustomSource, Fate, PromptDataset, PromptRow, RolloutDataSource, TokenizedPrompt


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


def test_groups_given_back_are_dropped_and_counted():
    given = source()
    groups = given.get_samples(2)
    given.add_samples(groups[:1])
    given.ledger.settle(groups[1:], Fate.TRAINED)
    assert given.get_samples(1)[0][0].group_index == 2
    assert given.ledger.counts == {
        "generated": 6, "trained": 2, "filtered": 0, "aborted": 2, "buffered": 0, "out": 2
    }  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(
    size=st.integers(1, 7),
    samples=st.integers(1, 3),
    shuffle=st.booleans(),
    weights=st.none() | st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)),
    takes=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    data=st.data(),
)
def test_stopping_anywhere_and_continuing_equals_never_stopping(size, samples, shuffle, weights, takes, data):
    stop = data.draw(st.integers(0, len(takes)))

    def run(given, some):
        seen = []
        for take in some:
            groups = given.get_samples(take)
            seen += [sample.to_dict() for group in groups for sample in group]
            given.ledger.settle(groups, Fate.TRAINED)
            assert given.check_ledger() is None
        return seen

    uninterrupted = run(source(size, samples, shuffle, weights=weights), takes)
    before = source(size, samples, shuffle, weights=weights)
    seen = run(before, takes[:stop])
    state = json.loads(json.dumps(before.state_dict()))
    run(before, takes)  # what the old object does afterwards must not matter
    after = source(size, samples, shuffle, weights=weights)
    after.load_state_dict(state)
    assert seen + run(after, takes[stop:]) == uninterrupted


def test_what_is_out_when_the_state_is_taken_comes_first_as_it_stood():
    given = source(samples=2, shuffle=False)
    first, second = given.get_samples(2)
    second[0].append_response([7, 8], text="ab", log_probs=[-0.1, -0.2], weight_version=3)
    second[0].status = Status.ABORTED
    given.ledger.settle([first], Fate.TRAINED)
    state = given.state_dict()
    kept = copy.deepcopy(second)
    second[0].tokens.append(99)
    second[0].metadata["later"] = True
    after = source(samples=2, shuffle=False)
    after.load_state_dict(json.loads(json.dumps(state)))
    assert after.state_dict() == state
    assert after.check_ledger() is None
    again = after.get_samples(2)
    assert again[0] == kept
    assert again[1][0].group_index == 2
    again[0][0].tokens.append(98)
    assert 98 not in state["unfinished"][0][0]["tokens"]


def test_a_state_that_lacks_something_is_refused_and_changes_nothing():
    given = source()
    given.get_samples(3)
    before = given.state_dict()
    state = source().state_dict()
    del state["ledger"], state["epoch"]
    with pytest.raises(DataError, match="lacks epoch, ledger"):
        given.load_state_dict(state)
    state = source().state_dict() | {"unfinished": [[{"index": 0, "group_index": 0, "prompt": "p", "reward": "bad"}]]}
    with pytest.raises(DataError, match="reward"):
        given.load_state_dict(state)
    assert given.state_dict() == before


def test_an_invalid_sample_is_told_when_the_state_is_taken():
    given = source()
    given.get_samples(1)[0][0].response_length = 9
    with pytest.raises(DataError, match="response_length 9 is not between 0 and 2 tokens"):
        given.state_dict()


def test_a_transaction_is_undone_as_if_nothing_had_happened():
    given = source(size=3, shuffle=False)
    given.ledger.settle(given.get_samples(1), Fate.TRAINED)
    given.get_samples(1)
    before = given.state_dict()
    undo = given.begin()
    groups = given.get_samples(4)
    given.ledger.settle(groups[:2], Fate.FILTERED)
    given.add_samples(groups[2:3])
    given.fresh_index()
    undo()
    assert given.state_dict() == before
    assert given.get_samples(1)[0][0].index == groups[0][0].index


def test_what_is_taken_back_comes_first_as_it_stands():
    given = source(shuffle=False)
    first, second = given.get_samples(2)
    first[0].metadata["so far"] = 1
    given.take_back()
    assert given.check_ledger() is None
    assert given.get_samples(3)[:2] == [first, second]


class Counting:
    """Numbers its samples itself, and keeps what is given back; derives from nothing."""

    def __init__(self):
        self.next, self.back = 0, []

    def get_samples(self, num_samples):
        return [self.back.pop(0) if self.back else self.fresh() for _ in range(num_samples)]

    def fresh(self):
        self.next += 1
        return [Sample(index=self.next * 10 + i, group_index=self.next, prompt="p", tokens=[1]) for i in range(2)]

    def add_samples(self, groups):
        self.back += groups

    def state_dict(self):
        return {"next": self.next, "back": [[sample.to_dict() for sample in group] for group in self.back]}

    def load_state_dict(self, state):
        self.next = state["next"]
        self.back = [[Sample.from_dict(values) for values in group] for group in state["back"]]


def test_a_custom_source_is_accounted_for_and_resumes():
    given = CustomSource(Counting())
    assert isinstance(given, DataSource)
    first, second, third = given.get_samples(3)
    given.add_samples([first])
    with pytest.raises(DataError, match="sample 10 cannot be given back"):
        given.add_samples([first])
    given.ledger.settle([second], Fate.TRAINED)
    after = CustomSource(Counting())
    after.load_state_dict(json.loads(json.dumps(given.state_dict())))
    assert after.state_dict()["source"] == given.state_dict()["source"]
    assert after.get_samples(2) == [third, first]  # what was out comes first
    assert after.fresh_index() > 2**39
    given.ledger.settle([third], Fate.TRAINED)
    assert given.check_ledger() is None
    with pytest.raises(DataError, match=r"lacks given_back, .*; continue with the same --data-source-path"):
        after.load_state_dict(source().state_dict())


def test_what_a_custom_source_gave_in_a_failed_rollout_is_handed_out_again():
    given = CustomSource(Counting())
    given.ledger.settle(given.get_samples(1), Fate.TRAINED)
    undo = given.begin()
    groups = given.get_samples(2)
    given.ledger.settle(groups[:1], Fate.FILTERED)
    undo()
    assert given.check_ledger() is None and given.ledger.counts["filtered"] == 0
    assert given.get_samples(3)[:2] == groups
    assert given.source.next == 4


@pytest.mark.parametrize(
    ("other", "words"),
    [({"size": 6}, "prompts 5 → 6"), ({"seed": 7}, "seed 42 → 7"), ({"shuffle": False}, "shuffle True → False")],
)
def test_a_state_of_other_data_is_refused(other, words):
    given = source(**other)
    with pytest.raises(DataError, match=words):
        given.load_state_dict(source().state_dict())
