import pytest

from slime_core.errors import DataError
from slime_core.types import Sample
from slime_rollout.data import Fate, Ledger


def group(number, size=2):
    return [Sample(index=number * size + place, group_index=number, prompt="p") for place in range(size)]


@pytest.fixture
def ledger():
    return Ledger()


def test_it_balances_when_every_sample_has_one_end(ledger):
    groups = [group(number) for number in range(5)]
    ledger.hand_out(groups)
    for fate, some in zip(Fate, groups, strict=False):
        ledger.settle([some], fate)
    ledger.put_back(groups[3:])
    assert ledger.problem(groups[3:]) is None
    ledger.hand_out(groups[3:4])
    ledger.settle(groups[3:4], Fate.TRAINED)
    ledger.drop_buffered(groups[4:])
    assert ledger.problem([]) is None
    assert ledger.counts == {"generated": 10, "trained": 4, "filtered": 4, "aborted": 2, "buffered": 0, "out": 0}


def test_a_lost_sample_is_named(ledger):
    ledger.hand_out([group(0), group(1)])
    ledger.settle([group(0)], Fate.TRAINED)
    assert ledger.problem([]) == (
        "the ledger does not balance: 4 generated, 2 trained + 0 filtered + 0 aborted + 0 buffered; "
        "out, neither trained on nor given back: 2 (samples 2, 3)"
    )


def test_one_lost_and_one_doubled_do_not_hide_each_other(ledger):
    ledger.hand_out([group(0, 1), group(1, 1)])
    ledger.settle([group(0, 1), group(0, 1)], Fate.TRAINED)
    text = ledger.problem([])
    assert "2 generated, 2 trained" in text
    assert "out, neither trained on nor given back: 1 (sample 1)" in text
    assert "handed out or settled twice, or never generated: 1 (sample 0)" in text


def test_a_sample_twice_in_its_group_is_a_fault(ledger):
    one = group(0)
    ledger.hand_out([one])
    ledger.settle([[*one, one[0]]], Fate.TRAINED)
    assert "settled twice, or never generated: 1 (sample 0)" in ledger.problem([])


def test_samples_of_one_trajectory_count_once(ledger):
    ledger.hand_out([group(0)])
    turn = Sample(index=100, group_index=0, trajectory_id=1, prompt="p")
    ledger.settle([[*group(0), turn]], Fate.TRAINED)
    assert ledger.problem([]) is None
    assert ledger.counts["trained"] == 2


def test_a_buffer_that_changed_behind_its_back_is_told(ledger):
    ledger.hand_out([group(0), group(1)])
    ledger.put_back([group(0), group(1)])
    text = ledger.problem([group(1), group(7)])
    assert "missing from the buffer: 2 (samples 0, 1)" in text
    assert "in the buffer without having been given back: 2 (samples 14, 15)" in text


def test_handing_out_what_is_out_is_a_fault(ledger):
    ledger.hand_out([group(0, 1), group(0, 1)])
    ledger.settle([group(0, 1)], Fate.TRAINED)
    assert "handed out or settled twice" in ledger.problem([])


@pytest.mark.parametrize("fate", Fate)
def test_what_has_ended_cannot_be_given_back(ledger, fate):
    ledger.hand_out([group(0), group(1)])
    ledger.settle([group(0)], fate)
    before = ledger.counts
    with pytest.raises(DataError, match="sample 0 cannot be given back: it is not out"):
        ledger.put_back([group(1), group(0)])
    with pytest.raises(DataError, match="sample 2 cannot be given back"):
        ledger.put_back([group(1), group(1)])
    assert ledger.counts == before


def test_many_samples_are_counted_and_a_few_named(ledger):
    ledger.settle([group(0, 100)], Fate.TRAINED)
    assert "never generated: 100 (samples 0, 1, 2, 3, 4, 5, 6, 7, …)" in ledger.problem([])
    assert len(ledger.state_dict()["faulty"]) == 8


def test_a_fault_survives_the_state(ledger):
    ledger.settle([group(0, 1)], Fate.TRAINED)
    after = Ledger()
    after.load_state_dict(ledger.state_dict(), [])
    assert after.problem([]) == ledger.problem([])
