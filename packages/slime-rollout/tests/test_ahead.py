"""Generating ahead of the trainer: what becomes of every prompt."""

import asyncio
import json
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_rollout.generate import sampling_seed

INDEX = {sampling_seed(5, index): index for index in range(600)}


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_prompt_is_trained_on_or_dropped_once(manager, engine, reply, data):
    """Whatever is filtered, stale or lost on its way, and whenever what is in flight is aborted."""
    right = data.draw(st.sets(st.integers(0, 200)), label="right answers")
    lost = data.draw(st.sets(st.integers(0, 40), max_size=3), label="requests whose connection breaks")
    stale = data.draw(st.none() | st.integers(1, 2), label="staleness")
    ends = st.sampled_from(["none", "close", "restart", "cancel"])
    ends = data.draw(st.lists(ends, min_size=4, max_size=4), label="before each rollout")
    delays = data.draw(st.lists(st.sampled_from([0.0, 0.01, 0.03]), min_size=7, max_size=7), label="delays")
    state = {"version": "0", "held": False}

    async def answer(number, body):
        index = INDEX[body["sampling_params"]["sampling_seed"]]
        await asyncio.sleep(600 if state["held"] else delays[index % 7])
        if number in lost:
            return None
        text = str(index // 3 % 6) if index in right or index % 9 == 0 else "-1"
        return reply(text=text, version=state["version"])

    engine.answer = answer
    changes = {
        "async_buffer_size": 2,
        "dynamic_sampling_filter_path": "slime_rollout.filters.check_reward_nonzero_std",
        "max_weight_staleness": stale,
        "dynamic_sampling_max_prompts": 500,
    }

    def cancel(rollout_id):
        """A rollout that waits for engines; it may have all that it needs, and is forgotten then."""
        given_.close()
        state["held"] = True
        with ThreadPoolExecutor(1) as pool:
            rollout = pool.submit(given_.generate, rollout_id)
            while engine.in_flight == 0 and not rollout.done():
                time.sleep(0.005)
            given_.cancel()
            error = rollout.exception(20)
        state["held"] = False
        assert error is None or isinstance(error, CancelledError)

    given_, trained, saved = manager(**changes), [], None
    for number, end in enumerate(["none", *ends]):
        state["version"] = str(number)
        if end == "close":
            given_.close()
        elif end == "restart":
            given_ = manager(**changes)
        elif end == "cancel":
            cancel(number)
        if end in ("restart", "cancel"):
            given_.load_state_dict(saved)
        batch = given_.generate(number)
        assert len(batch.groups) == 2
        assert given_.account().problem is None
        if stale is not None:
            assert number - min(min(sample.weight_versions) for sample in batch.samples) <= stale
        trained += [sample.index for sample in batch.samples]
        saved = json.loads(json.dumps(given_.state_dict()))
    assert len(set(trained)) == len(trained) == given_.source.ledger.counts["trained"] == 30
