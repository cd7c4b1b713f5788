import asyncio
import gc
import weakref

import pytest

from slime_core.types import Sample
from slime_rollout.event_loop import PerLoop, run
from slime_rollout.rewards import BatchedReward
from slime_rollout.rewards.custom import AT_ONCE, FunctionCalls


class Large:
    def __repr__(self):
        raise AssertionError("nobody has to write this out")


def test_a_result_is_not_written_out():
    large = Large()

    async def main():
        await asyncio.sleep(0)
        return large

    assert run(main()) is large


def test_an_error_is_raised_as_it_is():
    async def main():
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        run(main())


def test_each_event_loop_has_a_value_of_its_own():
    made = PerLoop(list)

    async def twice():
        return made.here() is made.here(), made.here()

    (same, one), (_, other) = asyncio.run(twice()), asyncio.run(twice())
    assert same and one == other and one is not other


async def one_by_one():
    await asyncio.sleep(0)


async def score(group):
    await asyncio.sleep(0)
    return [1.0] * len(group)


def contended_calls():
    made = FunctionCalls("own", one_by_one, timeout=30.0)
    return lambda: made("sample 1"), 2 * AT_ONCE


def contended_batches():
    made = BatchedReward(score)
    return lambda: made(Sample(index=0, group_index=0, prompt="a")), 2


@pytest.mark.parametrize("contended", [contended_calls, contended_batches])
def test_rollouts_leave_no_event_loops_behind(contended):
    ask, count = contended()
    loops = weakref.WeakSet()

    async def rollout():
        loops.add(asyncio.get_running_loop())
        await asyncio.gather(*(ask() for _ in range(count)))

    for _ in range(6):
        run(asyncio.wait_for(rollout(), 30))
    gc.collect()
    assert len(loops) <= 1  # that of the last rollout, until the next
