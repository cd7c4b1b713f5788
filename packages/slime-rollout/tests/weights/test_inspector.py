"""Which weights engines hold wrong, from checksums. On real engines: `integration_tests/test_canary.py` of the root."""

import hashlib

import pytest
import torch

import slime_rollout.weights.inspector
from slime_core.types import WeightUpdate
from slime_rollout.engine import WeightSyncError
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.weights.gpu_checksum import GpuChecksum
from slime_rollout.weights.inspector import Gathered, WeightInspector, check_engines, engine_place, find_wrong

A, B = "http://a", "http://b"


def sha(tensor):
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def gpu(tensor):
    checksum = GpuChecksum()
    checksum.update(tensor)
    return checksum.hexdigest()


@pytest.fixture
def sent():
    """Two layers with attention, three experts, and a vocabulary that engines pad."""
    dice = torch.Generator().manual_seed(3)
    shapes = {"model.embed_tokens.weight": (70, 8), "model.norm.weight": (8,)}
    for layer in range(2):
        own = f"model.layers.{layer}."
        shapes |= {f"{own}self_attn.{part}_proj.weight": (rows, 8) for part, rows in (("q", 8), ("k", 4), ("v", 4))}
        shapes[f"{own}self_attn.o_proj.weight"] = (8, 8)
        for expert in range(3):
            for part, shape in (("gate", (6, 8)), ("up", (6, 8)), ("down", (8, 6))):
                shapes[f"{own}mlp.experts.{expert}.{part}_proj.weight"] = shape
    return {name: torch.randn(shape, generator=dice) for name, shape in shapes.items()}


def held(sent, size, checksum=sha):
    """What each rank of an engine computes checksums of, put together by hand."""
    ranks = []
    for rank in range(size):

        def part(name, dim, rank=rank):
            return sent[name].chunk(size, dim)[rank]

        padded = torch.cat([sent["model.embed_tokens.weight"], torch.zeros(58, 8)])
        found = {"model.embed_tokens.weight": padded.chunk(size)[rank], "model.norm.weight": sent["model.norm.weight"]}
        for layer in range(2):
            own = f"model.layers.{layer}."
            qkv = [part(f"{own}self_attn.{one}_proj.weight", 0) for one in "qkv"]
            found[f"{own}self_attn.qkv_proj.weight"] = torch.cat(qkv)
            found[f"{own}self_attn.o_proj.weight"] = part(f"{own}self_attn.o_proj.weight", 1)
            experts = [f"{own}mlp.experts.{expert}." for expert in range(3)]
            gates = [torch.cat([part(f"{one}{half}_proj.weight", 0) for half in ("gate", "up")]) for one in experts]
            found[f"{own}mlp.experts.w13_weight"] = torch.stack(gates)
            found[f"{own}mlp.experts.w2_weight"] = torch.stack([part(f"{one}down_proj.weight", 1) for one in experts])
        ranks.append({name: checksum(tensor) for name, tensor in found.items()} | {"rotary_emb.cos_sin_cache": "0"})
    return ranks


def gather(sent, size, dtype="float32", device="cpu"):
    gathered = Gathered(size, dtype, device)
    items = [*sent.items()]
    gathered.add(items[:3])
    gathered.add(items[3:])
    return gathered


def expected(sent, size):
    return gather(sent, size).expected(size)


@pytest.mark.parametrize("size", [1, 2])
def test_every_weight_of_every_rank_is_compared(sent, size):
    right, ranks = expected(sent, size), held(sent, size)
    for own, rank in zip(right, ranks, strict=True):
        assert own.keys() >= rank.keys() - {"rotary_emb.cos_sin_cache"}
        assert all(own[name] >= {text} for name, text in rank.items() if name in own)
    assert str(find_wrong({A: ranks, B: ranks}, right)) == ""
    check_engines(4, {A: ranks, B: ranks}, gather(sent, size))
    check_engines(4, {A: ranks * 2}, gather(sent, size))  # two stages of a pipeline, if each had all layers


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["self_attn.qkv_proj.weight", "self_attn.o_proj.weight", "mlp.experts.w2_weight"])
def test_a_weight_that_is_wrong_in_one_layer_is_named(sent, size, name):
    right, ranks = expected(sent, size), held(sent, size)
    ranks[-1][f"model.layers.1.{name}"] = "else"
    assert str(find_wrong({A: held(sent, size), B: ranks}, right)) == f"{B} holds model.layers.1.{name} wrong"
    with pytest.raises(WeightSyncError, match=f"{B} holds model.layers.1.{name} wrong; send the weights again"):
        check_engines(4, {A: held(sent, size), B: ranks}, gather(sent, size))


def test_what_is_unlike_in_all_layers_may_only_be_laid_out_otherwise(sent):
    right, ranks = expected(sent, 1), held(sent, 1)
    for layer in range(2):
        ranks[0][f"model.layers.{layer}.mlp.experts.w2_weight"] = "else"
    ranks[0]["model.norm.weight"] = "else"
    assert str(find_wrong({A: ranks}, right)) == (
        f"{A} holds model.norm.weight wrong; every engine holds model.layers.*.mlp.experts.w2_weight otherwise, in all "
        "layers: wrong, or only laid out otherwise"
    )


def test_without_what_was_sent_engines_are_compared_with_the_first(sent):
    ranks = held(sent, 1)
    ranks[0]["model.norm.weight"] = "else"
    assert str(find_wrong({A: held(sent, 1), B: ranks}, None)) == f"{B} holds model.norm.weight wrong"
    del ranks[0]["model.norm.weight"]
    assert str(find_wrong({A: held(sent, 1), B: ranks}, None)) == f"{B} holds model.norm.weight wrong"
    assert str(find_wrong({A: held(sent, 1), B: held(sent, 2)}, None)) == f"{B} holds 2 ranks instead of 1 wrong"


def test_what_may_be_laid_out_otherwise_is_a_warning_where_that_may_be(sent, caplog):
    ranks = held(sent, 1)
    for layer in range(2):
        ranks[0][f"model.layers.{layer}.mlp.experts.w2_weight"] = "else"
    check_engines(4, {A: ranks}, gather(sent, 1))
    assert "every engine holds model.layers.*.mlp.experts.w2_weight otherwise" in caplog.text
    for layer in range(2):
        ranks[0][f"model.layers.{layer}.self_attn.o_proj.weight"] = "else"
    with pytest.raises(WeightSyncError, match=r"self_attn\.o_proj"):
        check_engines(4, {A: ranks}, gather(sent, 1))
    ranks = held(sent, 2)
    for rank in ranks:
        rank |= {name: "else" for name in rank if name.endswith("o_proj.weight")}
    check_engines(4, {A: ranks}, gather(sent, 2))
    assert "every engine holds model.layers.*.self_attn.o_proj.weight otherwise" in caplog.text
    with pytest.raises(WeightSyncError, match=f"{A} holds no weight by a name that was sent; send the weights again"):
        check_engines(4, {A: [{"other": "1"}]}, gather(sent, 1))


def test_an_engine_may_hold_parts_by_themselves_and_in_either_dtype(sent):
    parts = {name: tensor for name, tensor in sent.items() if "self_attn" in name}
    for dtype in (torch.float32, torch.bfloat16):
        ranks = [{name: tensor.to(dtype) for name, tensor in parts.items()}]
        right = {A: [{name: sha(tensor.view(torch.uint8)) for name, tensor in ranks[0].items()}]}
        check_engines(4, right, gather(sent, 1, "bfloat16"))
    wrong = {name: sha(tensor.half().view(torch.uint8)) for name, tensor in parts.items()}
    with pytest.raises(WeightSyncError, match=r"o_proj"):
        check_engines(4, {A: [wrong]}, gather(sent, 1, "bfloat16"))


def test_beside_quantized_weights_the_others_are_compared(sent, caplog):
    quantized = "model.layers.0.self_attn.o_proj.weight"
    given = sent | {quantized: sent[quantized].to(torch.float8_e4m3fn), f"{quantized}_scale_inv": torch.ones(1)}
    ranks = [rank | {quantized: "its own", f"{quantized}_scale_inv": "its own"} for rank in held(sent, 1)]
    check_engines(4, {A: ranks}, gather(given, 1))
    assert "not compared with what was sent: 2 quantized tensors or scales" in caplog.text
    ranks[0]["model.norm.weight"] = "else"
    with pytest.raises(WeightSyncError, match=f"{A} holds model.norm.weight wrong; send the weights again"):
        check_engines(4, {A: ranks}, gather(given, 1))


def test_a_fused_weight_of_which_parts_are_missing_is_not_compared(sent):
    del sent["model.layers.0.self_attn.v_proj.weight"]
    right = expected(sent, 1)[0]
    assert "model.layers.0.self_attn.qkv_proj.weight" not in right
    assert {"model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.qkv_proj.weight"} <= right.keys()


def test_parts_that_come_in_another_order_are_not_compared(sent):
    turned = dict(reversed(sent.items()))
    assert "model.layers.0.self_attn.qkv_proj.weight" not in expected(turned, 1)[0]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.3.self_attn.k_proj.bias", ("model.layers.3.self_attn.qkv_proj.bias", 1, 3)),
        (
            "model.layers.3.mlp.shared_experts.up_proj.weight",
            ("model.layers.3.mlp.shared_experts.gate_up_proj.weight", 1, 2),
        ),
        ("model.layers.3.mlp.experts.7.up_proj.weight", ("model.layers.3.mlp.experts.w13_weight", 15, 0)),
        ("model.layers.3.mlp.experts.7.down_proj.weight", ("model.layers.3.mlp.experts.w2_weight", 7, 0)),
        ("lm_head.weight", ("lm_head.weight", 0, 0)),
    ],
)
def test_where_an_engine_has_a_tensor(name, place):
    assert engine_place(name) == place


def inspect(monkeypatch, sent, info, ranks):
    answers = {"/server_info": info, "/weights_checker": {"ranks": [{"checksums": rank} for rank in ranks]}}
    monkeypatch.setattr(
        slime_rollout.weights.inspector, "call", lambda method, url, *more, **how: answers[url.removeprefix(A)]
    )
    inspector = WeightInspector(ChannelSpec((A,)))
    inspector.begin(WeightUpdate(version=4))
    assert inspector.send([*sent.items()]) == 0
    return inspector.end()


def test_it_is_a_channel_that_sends_nothing(monkeypatch, sent):
    info, ranks = {"device": "cpu", "dtype": "float32"}, held(sent, 1)
    assert inspect(monkeypatch, sent, info, ranks) == {}
    ranks[0]["model.norm.weight"] = "else"
    with pytest.raises(WeightSyncError, match=f"weight version 4: {A} holds model.norm.weight wrong"):
        inspect(monkeypatch, sent, info, ranks)
    assert inspect(monkeypatch, sent, info | {"device": "xpu"}, ranks) == {}  # another kind of checksum
    with pytest.raises(WeightSyncError, match=r"model\.embed_tokens\.weight"):
        inspect(monkeypatch, sent, info | {"device": "cuda"}, ranks)
    assert inspect(monkeypatch, sent, info | {"device": "cuda"}, held(sent, 1, gpu)) == {}
    with pytest.raises(WeightSyncError, match="does not report its device and dtype"):
        inspect(monkeypatch, sent, {}, ranks)
