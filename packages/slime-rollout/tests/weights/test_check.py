import hashlib

import pytest
import torch

from slime_core.types import WeightUpdate
from slime_rollout.engine import WeightSyncError
from slime_rollout.weights import TensorWeightChannel
from slime_rollout.weights.check import SentDigests

Q, K, V = (torch.full((rows, 3), float(rows)) for rows in (4, 2, 2))
LAYER = "model.layers.0.self_attn."
SENT = [(LAYER + "q_proj.weight", Q), (LAYER + "k_proj.weight", K), (LAYER + "v_proj.weight", V)]


def sha(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@pytest.fixture
def digests():
    digests = SentDigests()
    digests.add(SENT[:2])
    digests.add([*SENT[2:], ("model.embed_tokens.weight", torch.ones(70, 2)), ("model.norm.weight", torch.ones(3))])
    return digests


def test_what_engines_hold_is_known_by_name_joined_and_padded(digests):
    padded = torch.cat([torch.ones(70, 2), torch.zeros(58, 2)])
    good = {
        LAYER + "qkv_proj.weight": sha(torch.cat([Q, K, V])),
        "model.embed_tokens.weight": sha(padded),
        "model.norm.weight": sha(torch.ones(3)),
        "model.rotary.cache": "not sent",
    }
    assert digests.compare(good) == (list(good)[:3], [])
    wrong = {**good, LAYER + "qkv_proj.weight": sha(torch.cat([Q, V, K]) + 1), "model.norm.weight": sha(torch.zeros(3))}
    assert digests.compare(wrong) == (["model.embed_tokens.weight"], [LAYER + "qkv_proj.weight", "model.norm.weight"])


def test_parts_that_come_in_another_order_are_not_judged():
    digests = SentDigests()
    digests.add([SENT[1], SENT[0], SENT[2]])
    assert digests.compare({LAYER + "qkv_proj.weight": "x"}) == ([], [])


@pytest.fixture
def channel(engines):
    for engine in engines:
        holds(engine, torch.ones(3))
        engine.answers["/server_info"] = {"device": "cpu", "dtype": "float32"}
    return TensorWeightChannel(tuple(engine.url for engine in engines), check=True)


def holds(engine, *ranks):
    engine.answers["/weights_checker"] = {"ranks": [{"checksums": {"w": sha(rank)}} for rank in ranks]}


def push(channel, tensor):
    channel.begin(WeightUpdate(version=4))
    channel.send([("w", tensor)])
    channel.end()


def test_engines_that_hold_what_was_sent_are_confirmed(channel, engines):
    push(channel, torch.ones(3))
    assert [engine.version for engine in engines] == ["4", "4"]


def test_an_engine_that_differs_from_the_others_is_named(channel, engines):
    holds(engines[1], torch.zeros(3))
    with pytest.raises(
        WeightSyncError, match=f"{engines[1].url} holds other weights than {engines[0].url}: w;"
    ) as caught:
        push(channel, torch.ones(3))
    assert caught.value.url == engines[1].url
    assert [engine.version for engine in engines] == ["incomplete", "incomplete"]


def test_engines_that_all_hold_something_else_are_noticed_on_a_cpu(channel, engines):
    with pytest.raises(WeightSyncError, match="does not hold what was sent: w;"):
        push(channel, torch.zeros(3))
    with pytest.raises(WeightSyncError, match="does not hold what was sent: w;"):
        push(channel, -torch.ones(3))


@pytest.mark.parametrize(
    ("info", "tp_size", "sent", "why"),
    [
        ({"device": "cuda", "dtype": "float32"}, 1, torch.zeros(3), "engines on cuda compute another kind of checksum"),
        ({"device": "cpu", "dtype": "bfloat16"}, 1, torch.zeros(3), "float32 was sent and the engine has bfloat16"),
        ({"device": "cpu", "dtype": "float32"}, 2, torch.zeros(3), "every rank holds a part"),
    ],
)
def test_where_engines_have_no_checksum_of_it_only_they_are_compared(
    channel, engines, info, tp_size, sent, why, caplog
):
    channel.tp_size = tp_size
    for engine in engines:
        engine.answers["/server_info"] = info
        holds(engine, *[torch.ones(3)] * tp_size)
    push(channel, sent)
    (line,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert line.message == f"weight version 4: engines hold the same; not compared with what was sent: {why}"
    holds(engines[1], *[torch.zeros(3)] * tp_size)
    with pytest.raises(WeightSyncError, match="holds other weights"):
        push(channel, sent)


def test_an_engine_without_checksums_is_named(channel, engines):
    engines[0].answers["/weights_checker"] = {"success": True}
    with pytest.raises(WeightSyncError, match="/weights_checker gives no checksums"):
        push(channel, torch.ones(3))
