import asyncio

import pytest

from slime_core.types import Sample
from slime_rollout import errors
from slime_rollout.errors import FailureLimit, RewardError, Tolerance, VerifierError

FAILED = VerifierError("own raised ValueError")


def sample(index=0, **more):
    return Sample(index=index, group_index=0, prompt="a", response="b", **more)


def settle(tolerance, *outcomes):
    return tolerance.settle([sample(index) for index in range(len(outcomes))], outcomes)


def test_what_a_wrong_answer_gets_has_the_names_that_rewards_have():
    tolerance = Tolerance(drop=False)
    assert settle(tolerance, FAILED) == [0.0]
    given = {"score": 1.0, "style": 2.0}
    zero = {"score": 0.0, "style": 0.0}
    assert settle(tolerance, FAILED, given, FAILED) == [zero, given, zero]  # those of the same call too
    first, second = settle(tolerance, FAILED, FAILED)
    assert first == second == zero and first is not second
    settle(tolerance, 0.5)
    assert settle(tolerance, FAILED) == [0.0]


def test_names_that_are_told_stand_in_until_there_is_a_reward():
    tolerance = Tolerance(drop=False, names=("score", "acc"))
    assert settle(tolerance, FAILED) == [{"score": 0.0, "acc": 0.0}]
    settle(tolerance, {"score": 1.0})
    assert settle(tolerance, FAILED) == [{"score": 0.0}]


def test_what_is_told_stays():
    tolerance = Tolerance({"score": -1.0}, drop=False)
    settle(tolerance, {"score": 1.0, "more": 1.0})
    assert settle(tolerance, FAILED) == [{"score": -1.0}]


def test_failures_in_a_row_end_the_run_and_one_reward_starts_the_count_again():
    tolerance = Tolerance(drop=False, name="own", limit=FailureLimit(calls=3))
    for _ in range(2):
        settle(tolerance, FAILED, FAILED)
    assert settle(tolerance, FAILED, 1.0) == [0.0, 1.0]
    for _ in range(2):
        settle(tolerance, FAILED)
    with pytest.raises(RewardError) as caught:
        settle(tolerance, FAILED)
    assert str(caught.value) == "own has failed 3 times in a row; at last: own raised ValueError"
    assert not isinstance(caught.value, VerifierError)
    with pytest.raises(RewardError, match="has failed 4 times"):
        settle(tolerance, FAILED)
    settle(tolerance, 1.0)
    settle(tolerance, FAILED)


@pytest.fixture
def clock(monkeypatch):
    """Time as it is set."""
    now = [100.0]
    monkeypatch.setattr(errors.time, "monotonic", lambda: now[0])
    return now


def test_all_of_a_patience_must_be_at_its_end(clock):
    tolerance = Tolerance(drop=False, name="own", limit=FailureLimit(calls=3, samples=8, seconds=60.0))
    for _ in range(4):  # 8 samples in 4 calls, at once
        settle(tolerance, FAILED, FAILED)
    clock[0] += 59.0
    settle(tolerance, FAILED)
    clock[0] += 1.0
    with pytest.raises(RewardError, match=r"own has failed 6 times in a row, for 1 min and has never given a reward"):
        settle(tolerance, FAILED)
    settle(tolerance, 1.0)
    clock[0] += 90.0
    settle(tolerance, *[FAILED] * 8)  # time, calls and samples begin again
    clock[0] += 60.0
    settle(tolerance, FAILED)
    with pytest.raises(RewardError, match="own has failed 3 times in a row, for 1 min; at last"):
        settle(tolerance, FAILED)


def test_few_samples_do_not_end_a_run_however_long_it_takes(clock):
    tolerance = Tolerance(drop=False, name="own", limit=FailureLimit(samples=8, seconds=60.0))
    for _ in range(7):
        settle(tolerance, FAILED)
        clock[0] += 600.0
    with pytest.raises(RewardError):
        settle(tolerance, FAILED)


def test_without_a_limit_there_is_none():
    tolerance = Tolerance(drop=False)
    assert [settle(tolerance, FAILED) for _ in range(1000)] == [[0.0]] * 1000


def test_a_sample_that_is_scored_later_is_trained_on_again():
    tolerance, one = Tolerance(drop=True), sample()
    tolerance.settle([one], [FAILED])
    assert (one.remove_sample, one.metadata) == (True, {"reward_failure": "own raised ValueError"})
    tolerance.settle([one], [1.0])
    assert (one.remove_sample, one.metadata) == (False, {})
    of_the_teacher = sample(remove_sample=True, metadata={"reward_failure": "a", "teacher_failure": "b"})
    tolerance.settle([of_the_teacher], [1.0])
    assert (of_the_teacher.remove_sample, of_the_teacher.metadata) == (True, {"teacher_failure": "b"})
    left_out = sample(remove_sample=True)
    tolerance.settle([left_out], [1.0])
    assert left_out.remove_sample


def test_other_errors_and_cancellation_pass():
    async def fails(given):
        raise RewardError("no")

    async def waits(given):
        await asyncio.sleep(60)

    async def cancelled(reward, given):
        task = asyncio.create_task(reward(given))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for kind, given in (("each", sample()), ("group", [sample()])):
        wrap = getattr(Tolerance(drop=False), kind)
        with pytest.raises(RewardError, match=r"^no$"):
            asyncio.run(wrap(fails)(given))
        asyncio.run(asyncio.wait_for(cancelled(wrap(waits), given), 20))


def test_without_tolerance_the_first_failure_is_raised():
    with pytest.raises(VerifierError, match="own raised"):
        settle(Tolerance(drop=False, strict=True), 1.0, FAILED)
    assert settle(Tolerance(drop=False, strict=True), 1.0) == [1.0]
