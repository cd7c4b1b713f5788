"""Partial rollouts under aborts at any moment."""

import asyncio

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_rollout.generate import sampling_seed

INDEX = {sampling_seed(5, index): index for index in range(60)}


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_responses_that_are_cut_off_again_and_again_stay_in_their_budget(manager, engine, reply, write_rows, data):
    """Whatever is aborted and however often: every sample ends once, within its tokens, with what its row says."""
    most, parts = 7, data.draw(st.lists(st.integers(0, 3), min_size=11, max_size=11), label="tokens before each cut")
    rows = [{"prompt": f"say {number}", "label": "1", "metadata": {"from": number, "k": [1]}} for number in range(6)]
    asked_for, waiting, free = {}, {}, set()

    async def answer(number, body):
        index, room = INDEX[body["sampling_params"]["sampling_seed"]], body["sampling_params"]["max_new_tokens"]
        times = asked_for[index] = asked_for.get(index, 0) + 1
        cut = parts[(index + 3 * times) % 11]
        if index not in free and index % 2 and cut < room and times < 4:
            waiting[body["rid"]] = aborted = asyncio.Event()
            await aborted.wait()
            return reply(text="1", tokens=(7,) * cut, finish={"type": "abort"})
        return reply(text="1", tokens=(8,) * room, finish={"type": "length", "length": room})

    engine.answer = answer
    engine.on_abort = lambda told: [event.set() for rid, event in [*waiting.items()] if rid.startswith(told["rid"])]
    given_ = manager(
        prompt_data=write_rows(rows, "metadata.jsonl"),
        n_samples_per_prompt=1,
        over_sampling_batch_size=6,
        partial_rollout=True,
        rollout_max_response_len=most,
    )
    trained = []
    for number in range(6):
        free.update(sorted(asked_for)[: 2 * number])  # the oldest end at last, so that a rollout does
        batch = given_.generate(number)
        assert given_.source.check_ledger() is None
        trained += batch.samples
    assert len({sample.index for sample in trained}) == len(trained) == given_.source.ledger.counts["trained"] == 12
    assert max(asked_for.values()) > 1
    for sample in trained:
        assert sample.response_length == most == len(sample.rollout_log_probs) == len(sample.weight_versions)
        assert sample.metadata == {"from": sample.group_index % 6, "k": [1]}
