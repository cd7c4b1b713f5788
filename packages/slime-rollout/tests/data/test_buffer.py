import copy
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slime_core.errors import DataError
from slime_core.hooks import HookArgs
from slime_core.interfaces import DataSource
from slime_core.types import Status
from slime_rollout.data import (
    Fate,
    PromptDataset,
    PromptRow,
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
    TokenizedPrompt,
)


def dataset(size=5):
    return PromptDataset(
        TokenizedPrompt(row=PromptRow(where="", prompt=f"p{place}", label=str(place)), tokens=[place, place + 1])
        for place in range(size)
    )


def source(kind=RolloutDataSourceWithBuffer, size=5, samples=2, **settings):
    return kind(dataset(size), samples_per_prompt=samples, shuffle=True, seed=42, **settings)


def numbers(groups):
    return [group[0].group_index for group in groups]


class Picky(RolloutDataSourceWithBuffer):
    """Takes some at random, and drops what was tried three times."""

    def buffer_filter(self, args, buffer, num_samples):
        buffer[:] = [group for group in buffer if group[0].metadata.get("tries", 0) < 3]
        return self.random.sample(buffer, self.random.randint(0, min(num_samples, len(buffer))))


def test_groups_given_back_come_first_as_they_are():
    given = source()
    assert isinstance(given, DataSource)
    first, second, third = given.get_samples(3)
    first[0].metadata["partial"] = True
    given.add_samples([second, first])
    again = given.get_samples(3)
    assert again[0] is second
    assert again[1] is first
    assert again[2][0].group_index == third[0].group_index + 1


def test_part_of_a_group_can_be_given_back():
    given = source(samples=3)
    (group,) = given.get_samples(1)
    given.ledger.settle([group[:1]], Fate.TRAINED)
    given.add_samples([group[1:], []])
    assert given.check_ledger() is None
    assert [sample.index for sample in given.get_samples(1)[0]] == [1, 2]


def test_a_filter_chooses_as_the_seed_shows_it():
    """It only returns what it likes best, and removes nothing: what it returns must not be trained on twice."""
    seen = []

    def select_best(args, buffer, num_samples):
        seen.append((args.num_rollout, len(buffer), num_samples))
        return sorted(buffer, key=lambda group: -group[0].metadata["score"])[:num_samples]

    given = source(filter=select_best, args=HookArgs({"num_rollout": 7}))
    groups = given.get_samples(4)
    for score, group in zip([1, 4, 2, 3], groups, strict=True):
        group[0].metadata["score"] = score
    given.add_samples(groups)
    assert numbers(given.get_samples(2)) == [1, 3]
    assert numbers(given.get_samples(3)) == [2, 0, 4]
    assert seen == [(7, 4, 2), (7, 2, 3)]


def test_what_a_filter_removes_without_returning_it_is_dropped_and_counted():
    def drop_first(args, buffer, num_samples):
        del buffer[0]
        return [buffer.pop()]

    given = source(filter=drop_first)
    groups = given.get_samples(3)
    given.add_samples(groups)
    again = given.get_samples(1)
    assert again[0] is groups[2]
    assert given.ledger.counts["filtered"] == 2
    given.ledger.settle(again, Fate.TRAINED)
    assert given.check_ledger() is None


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        (lambda args, buffer, n: buffer[0], r"returned a group that is not in the buffer|returned 2 groups"),
        (lambda args, buffer, n: tuple(buffer[:n]), "returned tuple; return a list"),
        (lambda args, buffer, n: None, "returned NoneType"),
        (lambda args, buffer, n: buffer, "returned 3 groups; return 1 at most"),
        (lambda args, buffer, n: copy.deepcopy(buffer[:1]), "not in the buffer; return its groups as they are"),
        (lambda args, buffer, n: 1 / 0, "--buffer-filter-path raised ZeroDivisionError"),
    ],
)
def test_a_filter_that_goes_wrong_is_one_line_and_loses_nothing(choose, words):
    given = source(filter=choose)
    given.add_samples(given.get_samples(3))
    before = given.state_dict()
    with pytest.raises(DataError, match=words):
        given.get_samples(1)
    assert given.state_dict() == before


def test_a_filter_that_returns_a_group_twice_is_told():
    given = source(filter=lambda args, buffer, n: [buffer[0], buffer[0]])
    given.add_samples(given.get_samples(3))
    with pytest.raises(DataError, match="returned a group twice"):
        given.get_samples(2)


def test_a_filter_that_takes_samples_out_of_a_group_is_found_out():
    def shorten(args, buffer, num_samples):
        del buffer[0][1:]
        return buffer[:1]

    given = source(filter=shorten)
    given.add_samples(given.get_samples(1))
    given.ledger.settle(given.get_samples(1), Fate.TRAINED)
    assert "missing from the buffer: 1 (sample 1)" in given.check_ledger()


def test_a_buffer_is_not_forgotten_by_a_source_without_one():
    given = source()
    given.add_samples(given.get_samples(2))
    plain = source(RolloutDataSource)
    with pytest.raises(DataError, match="2 groups in a buffer, and RolloutDataSource has none"):
        plain.load_state_dict(given.state_dict())
    plain.get_samples(1)
    given.load_state_dict(plain.state_dict())
    assert numbers(given.get_samples(2)) == [0, 1]


@settings(deadline=None, max_examples=40)
@given(
    size=st.integers(1, 7),
    samples=st.integers(1, 3),
    kind=st.sampled_from([RolloutDataSourceWithBuffer, Picky]),
    batches=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=8),
    data=st.data(),
)
def test_stopping_anywhere_and_continuing_equals_never_stopping(size, samples, kind, batches, data):
    stop = data.draw(st.integers(0, len(batches)))

    def run(given, some):
        seen = []
        for take, give_back in some:
            groups = given.get_samples(take)
            seen += copy.deepcopy([[sample.to_dict() for sample in group] for group in groups])
            for group in groups[:give_back]:
                group[0].metadata["tries"] = group[0].metadata.get("tries", 0) + 1
            given.add_samples(groups[:give_back])
            given.ledger.settle(groups[give_back:], Fate.TRAINED)
            assert given.check_ledger() is None
        return seen

    uninterrupted = run(source(kind, size, samples), batches)
    before = source(kind, size, samples)
    seen = run(before, batches[:stop])
    state = json.loads(json.dumps(before.state_dict()))
    run(before, batches)  # what the old object does afterwards must not matter
    after = source(kind, size, samples)
    after.load_state_dict(state)
    assert seen + run(after, batches[stop:]) == uninterrupted


class BufferMachine(RuleBasedStateMachine):
    """Random use of a buffered source, with saving and restoring at any time, compared with a model of a few lists.

    The model holds, in order, what waits to be handed out and what is out, every sample as a dictionary, and how each
    of the others ended.
    """

    kind: type = RolloutDataSourceWithBuffer

    def __init__(self):
        super().__init__()
        self.source = source(self.kind, size=3)
        self.out = []  # groups of the source, in the order of hand-out
        self.waiting = []  # group as dictionaries
        self.first = 0  # of those, how many were out when the state was taken
        self.ends = {}  # sample → fate
        self.fresh = 0  # groups handed out for the first time
        self.saved = [self.snapshot()]

    def snapshot(self):
        waiting = [plain(group) for group in self.out] + self.waiting
        return json.dumps(
            [self.source.state_dict(), waiting, len(self.out) + self.first, list(self.ends.items()), self.fresh]
        )

    @rule(count=st.integers(0, 5))
    def get(self, count):
        groups = self.source.get_samples(count)
        again = [group for group in groups if group[0].group_index < self.fresh]
        self.check_again([plain(group) for group in again], count)
        for group in groups[len(again) :]:
            assert [sample.index for sample in group] == [2 * self.fresh, 2 * self.fresh + 1]
            assert all(sample.status is Status.PENDING and not sample.response_length for sample in group)
            self.fresh += 1
        assert len(groups) == count
        self.first = max(0, self.first - count)
        self.out += groups

    def check_again(self, again, count):
        assert again == self.waiting[:count]
        del self.waiting[:count]

    @precondition(lambda self: self.out)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 9), max_size=3))
    def generate_some(self, data, tokens):
        group = data.draw(st.sampled_from(self.out))
        sample = data.draw(st.sampled_from(group))
        sample.append_response(tokens, text="x" * len(tokens), log_probs=[-0.1] * len(tokens), weight_version=2)
        sample.status = data.draw(st.sampled_from([Status.ABORTED, Status.COMPLETED]))
        sample.reward = data.draw(st.sampled_from([None, 1.0, {"a": 0.5}]))
        sample.metadata["tries"] = sample.metadata.get("tries", 0) + 1

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give_back(self, data):
        groups = data.draw(st.lists(st.sampled_from(self.out), unique_by=id, max_size=4))
        self.source.add_samples(groups)
        self.leave(groups)
        self.waiting += [plain(group) for group in groups]

    @precondition(lambda self: self.out)
    @rule(data=st.data(), fate=st.sampled_from(Fate))
    def settle(self, data, fate):
        groups = data.draw(st.lists(st.sampled_from(self.out), unique_by=id, min_size=1, max_size=4))
        self.source.ledger.settle(groups, fate)
        self.leave(groups)
        self.end(groups, fate)
        with pytest.raises(DataError, match="cannot be given back"):
            self.source.add_samples(groups)

    def end(self, groups, fate):
        for sample in (sample for group in groups for sample in group):
            assert sample.index not in self.ends, "ended twice"
            self.ends[sample.index] = fate

    def leave(self, groups):
        left = set(map(id, groups))
        self.out = [group for group in self.out if id(group) not in left]

    @rule()
    def save(self):
        self.saved.append(self.snapshot())

    @rule(data=st.data())
    def restore(self, data):
        text = data.draw(st.sampled_from(self.saved))
        state, self.waiting, self.first, ends, self.fresh = json.loads(text)
        self.ends = {index: Fate(fate) for index, fate in ends}
        self.out = []
        self.source = source(self.kind, size=3)
        self.source.load_state_dict(state)
        assert self.source.state_dict() == state

    @invariant()
    def nothing_is_lost_or_doubled(self):
        counts = self.source.ledger.counts
        ended = {fate.value: list(self.ends.values()).count(fate) for fate in Fate}
        assert counts == {
            "generated": 2 * self.fresh,
            **ended,
            "buffered": sum(map(len, self.waiting)),
            "out": sum(map(len, self.out)),
        }
        assert counts["generated"] == sum(counts.values()) - counts["generated"]
        assert (self.source.check_ledger() is None) == (not self.out)

    def teardown(self):
        for _ in range(100):
            if not self.waiting:
                break
            self.source.ledger.settle(self.out, Fate.TRAINED)
            self.end(self.out, Fate.TRAINED)
            self.out = []
            self.get(3)
        self.source.ledger.settle(self.out, Fate.TRAINED)
        self.end(self.out, Fate.TRAINED)
        assert sorted(self.ends) == list(range(2 * self.fresh))
        assert self.source.check_ledger() is None


class PickyMachine(BufferMachine):
    """The same with a filter that takes out of order and drops."""

    kind = Picky

    def check_again(self, again, count):
        resumed = self.waiting[: min(self.first, count)]
        assert again[: len(resumed)] == resumed
        for group in again:
            self.waiting.remove(group)
        later = max(0, self.first - count)
        dropped = [] if count <= self.first else [group for group in self.waiting[later:] if is_tired(group)]
        self.waiting = [group for group in self.waiting if group not in dropped]
        for sample in (sample for group in dropped for sample in group):
            assert sample["index"] not in self.ends
            self.ends[sample["index"]] = Fate.FILTERED


def is_tired(group):
    return group[0]["metadata"].get("tries", 0) >= 3


def plain(group):
    return json.loads(json.dumps([sample.to_dict() for sample in group]))


SOME = settings(max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(SOME, max_examples=400, stateful_step_count=50)
TestBuffer, TestPicky = BufferMachine.TestCase, PickyMachine.TestCase
TestBuffer.settings = TestPicky.settings = SOME


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("machine", [BufferMachine, PickyMachine])
def test_many_random_uses(machine):
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=MANY)
