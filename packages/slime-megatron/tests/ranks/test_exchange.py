"""Values that ranks tell each other, against the same values in one process."""

import json
import math
import multiprocessing

import pytest
import torch.distributed as dist

from slime_megatron.ranks.exchange import broadcast_value, gather_values

VALUES = [
    [0.1, -0.0, 5e-324, math.inf, -math.inf, math.nan, 2**63, "größer ☃", None, True, [], {}],
    ["a" * 100_000, {"name": [1, 2.5, None]}],
    None,
]


def rank(number, file, answers):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=number, world_size=len(VALUES))
        later = dist.new_group([1, 2])
        found = [gather_values(VALUES[number])]
        if number:
            found += [gather_values(number, later), broadcast_value({"from": number}, 2, later)]
        answers.put((number, json.dumps(found)))
        dist.destroy_process_group()


def test_every_rank_has_the_values_of_all(tmp_path):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=rank, args=(number, tmp_path / "store", answers)) for number in range(3)]
    for process in ranks:
        process.start()
    found = dict(answers.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(60)
    # As text: NaN is not equal to itself, and -0.0 is to 0.0.
    assert found[0] == json.dumps([VALUES])
    assert found[1] == found[2] == json.dumps([VALUES, [1, 2], {"from": 2}])


def test_what_json_cannot_hold_is_refused():
    with pytest.raises(TypeError, match="not JSON serializable"):
        gather_values({1})
