import asyncio
import threading
import time

import pytest

from slime_core.hooks import HookArgs
from slime_core.types import Sample, Status
from slime_rollout.data import copied_group
from slime_rollout.rewards import BatchedFunction, CustomReward, VerifierError
from slime_rollout.rewards.lent import lent

LATE = """
import asyncio, threading
over, ended, held = threading.Event(), threading.Event(), []

def write(samples):
    for sample in samples:
        sample.metadata["late"] = True
        sample.tokens.append(9)
        sample.prompt[0]["content"] = "late"
        sample.reward = {"late": 1.0}
        sample.remove_sample = True
    if isinstance(samples, list):
        samples.clear()

def one(args, sample):
    sample.metadata["seen"] = True
    over.wait(30)
    write((sample,))
    ended.set()
    return 1.0

async def one_async(args, sample):
    return one(args, sample)

def batch(args, samples):
    samples[0].metadata["seen"] = True
    over.wait(30)
    write(samples)
    ended.set()
    return []
"""


def make_sample(**more):
    prompt = [{"role": "user", "content": "a"}]
    given = {"tokens": [1, 2, 3], "response_length": 1, "status": Status.COMPLETED, "metadata": {"row": {"a": [1]}}}
    return Sample(index=3, group_index=0, prompt=prompt, **given | more)


@pytest.mark.parametrize("name", ["one", "one_async", "batch"])
@pytest.mark.parametrize("cancelled", [False, True])
def test_what_is_left_behind_writes_to_nobodys_sample(tmp_path, name, cancelled):
    (tmp_path / "own.py").write_text(LATE)
    limit = 60.0 if cancelled else 0.3
    given = CustomReward(f"{tmp_path}/own.py:{name.replace('batch', 'one')}", HookArgs({}), timeout=limit)
    own = given._calls._function.__globals__
    if name == "batch":
        given = BatchedFunction("own", lambda samples: own["batch"](None, samples), timeout=limit)
    sample = make_sample()
    group = [sample]

    async def score():
        asked = asyncio.create_task(given(group if name == "batch" else sample))
        if cancelled:
            while "seen" not in sample.metadata:
                await asyncio.sleep(0.005)
            asked.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else VerifierError):
            await asked

    try:
        asyncio.run(asyncio.wait_for(score(), 30))
        sample.teacher_log_probs = [-1.0]
    finally:
        own["over"].set()
    assert own["ended"].wait(30)
    assert group == [sample]
    assert sample == make_sample(metadata={"row": {"a": [1]}, "seen": True}, teacher_log_probs=[-1.0])


def test_what_is_set_while_it_is_lent_is_set_in_both():
    samples = [make_sample(), make_sample()]
    with lent(samples) as given:
        given[0].teacher_log_probs = [-1.0]
        samples[1].metadata["teacher_failure"] = "no"
        samples[1].remove_sample = True
        assert given == samples and given[1] is not samples[1] and type(given[1]) is Sample
        given[1].validate()
    assert samples[0].teacher_log_probs == [-1.0] and given[1].remove_sample


def test_a_sample_is_copied_while_somebody_adds_to_its_metadata():
    sample, over = make_sample(), threading.Event()

    def add():
        number = 0
        while not over.is_set():
            number += 1
            sample.metadata[f"{number % 5000}"] = []
            sample.metadata.pop(f"{(number * 7) % 5000}", None)

    thread = threading.Thread(target=add, daemon=True)
    thread.start()
    try:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            copied_group([sample])
    finally:
        over.set()
        thread.join(20)
