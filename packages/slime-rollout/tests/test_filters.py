"""Calls of a filter: one at a time, whoever waits for them; and what they return."""

import asyncio
import threading

import pytest

from slime_core.errors import DataError
from slime_core.hooks import HookArgs
from slime_core.types import Drop, Keep, Sample
from slime_rollout.errors import HookTimeoutError
from slime_rollout.filters import CustomFilter, check_reward_nonzero_std

GROUPS = [[Sample(index=number, group_index=number, prompt="a")] for number in range(4)]


class Filter:
    """Waits in its first call until `over`; notes what it is asked about, and how many calls ran at once."""

    def __init__(self):
        self.over, self.began, self.ended = (threading.Event() for _ in range(3))
        self.asked, self.running, self.most = [], 0, 0

    def __call__(self, group):
        self.asked.append(group[0].group_index)
        self.running += 1
        self.most = max(self.most, self.running)
        self.began.set()
        if len(self.asked) == 1:
            self.over.wait(30)
        self.running -= 1
        return Keep()


@pytest.fixture
def keep(monkeypatch):
    """The filter that `ask` is."""
    made = Filter()
    monkeypatch.setattr(f"{__name__}.ask", lambda args, group: made(group), raising=False)
    yield made
    made.over.set()


def make(seconds):
    return CustomFilter(f"{__name__}:ask", HookArgs({}), time_limit=seconds)


def run(work):
    return asyncio.run(asyncio.wait_for(work, 60))


async def leave(call, began):
    """Begin a call, and wait for it no more once it runs."""
    task = asyncio.create_task(call)
    assert await asyncio.to_thread(began.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_the_next_rollouts_call_waits_for_one_that_was_left(keep):
    calls = make(30.0)
    run(leave(calls.judge(GROUPS[0]), keep.began))

    async def next_rollout():
        asyncio.get_running_loop().call_later(0.1, keep.over.set)
        return await calls.judge(GROUPS[1])

    assert run(next_rollout()) == Keep()
    assert (keep.asked, keep.most) == ([0, 1], 1)


def test_one_that_hangs_is_told_again_and_nothing_is_asked_for_those_that_left(keep):
    calls = make(0.2)
    for group in GROUPS[:3]:
        with pytest.raises(HookTimeoutError, match=rf"for group {group[0].group_index} was not done after 0\.2 s"):
            run(calls.judge(group))
    keep.over.set()
    calls._limit = 30.0
    assert run(calls.judge(GROUPS[3])) == Keep()
    assert (keep.asked, keep.most) == ([0, 3], 1)


def test_an_own_filter_may_say_true_or_false(manager, tmp_path, engine):
    (tmp_path / "own.py").write_text(
        "import torch\ndef keep(args, group): return torch.tensor(group[0].group_index % 2 == 1).bool().numpy()[()]\n"
    )
    batch = manager(dynamic_sampling_filter_path=f"{tmp_path}/own.py:keep").generate(0)
    assert [group[0].group_index for group in batch.groups] == [1, 3]
    assert batch.metrics["dynamic_filter/drop_rejected"] == 2


def test_a_filter_may_return_an_object_of_another_system(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "import dataclasses\n"
        "@dataclasses.dataclass\n"
        "class DynamicFilterOutput:\n"
        "    keep: bool\n"
        "    reason: str | None = None\n"
        "    keep_when_insufficient: bool = False\n"
        "outputs = iter([DynamicFilterOutput(True), DynamicFilterOutput(False), DynamicFilterOutput(False, 'why'),\n"
        "    DynamicFilterOutput(False, 'why', True)])\n"
        "def own(args, group): return next(outputs)\n"
    )
    keep = CustomFilter(f"{path}:own", HookArgs({}), time_limit=30.0)
    group = [Sample(index=0, group_index=0, prompt="p")]
    found = [keep(group) for _ in range(4)]
    assert found == [Keep(), Drop("rejected"), Drop("why"), Drop("why", keep_when_insufficient=True)]


def test_the_built_in_filter_counts_a_trajectory_once():
    class Args:
        reward_key = "score"

    def sample(index, trajectory, score):
        return Sample(index=index, group_index=0, trajectory_id=trajectory, prompt="p", reward={"score": score})

    assert check_reward_nonzero_std(Args, [sample(0, 0, 0.0), sample(1, 0, 1.0), sample(2, 2, 0.5)]) == Drop(
        "zero_std_0.5"
    )
    assert check_reward_nonzero_std(Args, [sample(0, 0, 0.0), sample(1, 1, 1.0)]) == Keep()

    least = [sample(0, 0, 0.0), sample(1, 1, 1e-6)]  # as rounding may part equal ones
    assert check_reward_nonzero_std(Args, least) == Drop("zero_std_0")


def test_a_filter_that_fails_for_a_group_of_one_is_named_with_it(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("def own(args, group): raise ValueError('no')\n")
    keep = CustomFilter(f"{path}:own", HookArgs({}), time_limit=30.0)
    with pytest.raises(DataError, match="own raised ValueError for group 3: no"):
        keep(GROUPS[3])
