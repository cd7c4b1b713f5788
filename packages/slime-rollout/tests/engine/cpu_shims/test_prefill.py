"""Which requests wait for another one's beginning; and real engines, which compute a common beginning once."""

import asyncio
import re
import sys
from array import array
from types import SimpleNamespace

import pytest

from slime_rollout.engine.sglang_flags import CPU_SHIMS
from slime_rollout.generate import EngineClient
from slime_rollout.http import call


@pytest.fixture(scope="module")
def gains():
    sys.path.insert(0, str(CPU_SHIMS))
    try:
        from slime_cpu_shims import prefill
    finally:
        sys.path.remove(str(CPU_SHIMS))
    return prefill._gains_by_waiting


def request(tokens, cached=0, asked=None, **changed):
    known = {"extra_key": None, "lora_id": None, "positional_embed_overrides": None}
    return SimpleNamespace(
        full_untruncated_fill_ids=array("q", tokens),
        prefix_len=cached,
        return_logprob=True,
        logprob_start_len=-1 if asked is None else asked,
        **known | changed,
    )


FIRST = request(range(40))


@pytest.mark.parametrize(
    ("late", "waits"),
    [
        (request(range(40)), True),
        (request([*range(20), *range(100, 120)]), True),
        (request([*range(19), *range(100, 121)]), False),
        (request([*range(36), *range(100, 104)], cached=33), False),
        (request([*range(39), 100], cached=33), True),
        (request(range(40), cached=37), False),
        (request(range(40), asked=39), True),
        (request(range(40), asked=0), False),
        (request(range(40), extra_key="other"), False),
        (request(range(40), lora_id="other"), False),
    ],
)
def test_a_request_waits_where_half_of_what_it_lacks_is_being_computed(gains, late, waits):
    assert gains(late, [request(range(500, 540)), FIRST]) == waits
    assert not gains(late, [])


@pytest.mark.real
@pytest.mark.timeout(240)
def test_a_common_beginning_is_computed_once(fleet):
    """16 prompts of 40 tokens that begin alike, eight samples of each: 257 tokens are enough, all are 5,120.

    Some requests may come when the first are being computed; without the hook it is about 1,100.
    """
    [log] = {slot.process._process.log_path for slot in fleet._engines[:1]}
    url = fleet.engine_urls[0]
    prompts = [[*range(100, 133), 200 + group, *range(134, 140)] for group in range(16)]
    params = {"max_new_tokens": 2, "temperature": 1.0, "ignore_eos": True}

    async def generate():
        async with asyncio.timeout(120), EngineClient(url, concurrency=128, timeout=120) as client:
            return await asyncio.gather(*(client.generate(prompt, params) for prompt in prompts for _ in range(8)))

    call("POST", f"{url}/flush_cache", {})
    before = len(log.read_text())
    done = asyncio.run(generate())
    assert [len(each.tokens) for each in done] == [2] * 128
    computed = sum(int(number) for number in re.findall(r"#new-token: (\d+)", log.read_text()[before:]))
    print(f"{computed} tokens were computed")
    assert 40 + 15 * 7 + 7 + 15 * 7 <= computed < 500
