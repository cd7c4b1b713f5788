"""Hand-made checkpoints in the layout that Megatron-LM writes: what real ranks are too few for, and what is broken.

Expert parallelism, Transformer Engine's names and the damage are hand-made; ``test_megatron_to_hf.py`` has checkpoints
of a real megatron-core model.
"""

import argparse
import re

import pytest
import torch

from slime_convert.errors import CheckpointError
from slime_convert.legacy import LegacyReader
from slime_convert.mapping.tensor_parallel import TensorParallel, merge, split

SPLITS = {
    "linear_qkv.weight": TensorParallel.ROWS,
    "linear_fc1.weight": TensorParallel.PAIRED_ROWS,
    "linear_fc2.weight": TensorParallel.COLUMNS,
    "word_embeddings.weight": TensorParallel.ROWS,
}
LAYER = "decoder.layers.{}."
QKV = LAYER + "self_attention.linear_qkv.weight"
FC1 = LAYER + "mlp.linear_fc1.weight"
ROUTER = LAYER + "mlp.router.weight"
EXPERT = LAYER + "mlp.experts.local_experts.{}.linear_fc{}.weight"
GROUPED = LAYER + "mlp.experts.linear_fc{}.weight{}"
EMBEDDING = "embedding.word_embeddings.weight"


def how(name):
    known = (kind for suffix, kind in SPLITS.items() if name.rstrip("0123456789").endswith(suffix))
    return next(known, TensorParallel.REPLICATED)


def merged(name, shards):
    return merge(shards, how(name))


def write(root, numbers, model, args=None, **more):
    directory = root / "_".join(["mp_rank", f"{numbers[0]:02d}", *(f"{number:03d}" for number in numbers[1:])])
    directory.mkdir(parents=True)
    models = model if isinstance(model, dict) and "model0" in model else {"model": model}
    state = {"checkpoint_version": 3.0, "iteration": 1, **models} | more
    if args is not None:
        state["args"] = argparse.Namespace(**args)
    torch.save(state, directory / "model_optim_rng.pt")


def shard(name, tensor, tp, rank):
    return split(tensor, how(name), tp)[rank].clone()


@pytest.fixture
def random_tensor():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


def sizes(tp=1, pp=1, ep=1, **more):
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
    } | more


# Tensor-, expert- and the experts' own tensor-parallel size, which only the arguments tell; whether they are recorded.
EXPERT_LAYOUTS = {
    "every rank its shard of its experts": (2, 2, None, True),
    "the same without arguments": (2, 2, None, False),
    "experts whole on each rank": (2, 2, 1, True),
    "more expert ranks than tensor ranks": (2, 4, 1, True),
    "experts only": (1, 2, None, True),
    "experts only, without arguments": (1, 2, None, False),
}


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "sequential"])
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS.values(), ids=EXPERT_LAYOUTS)
def test_experts_have_their_numbers_in_the_whole_model(tmp_path, random_tensor, layout, grouped):
    tp, ep, expert_tp, recorded = layout
    name = (lambda i, e, fc: GROUPED.format(i, fc, e)) if grouped else (lambda i, e, fc: EXPERT.format(i, e, fc))
    whole = {EMBEDDING: random_tensor(8, 4)}
    for layer in range(2):
        whole[ROUTER.format(layer)] = random_tensor(8, 4)
        whole[QKV.format(layer)] = random_tensor(12, 4)
        for expert in range(8):
            whole[name(layer, expert, 1)] = random_tensor(12, 4)
            whole[name(layer, expert, 2)] = random_tensor(4, 6)
    local = 8 // ep
    # Of all pairs of a tensor rank and an expert rank, those that exist: with experts whole, ranks count through both.
    pairs = [(t, e) for t in range(tp) for e in range(ep) if expert_tp is None or e % tp == t]
    for t, e in pairs:
        state = {key: shard(key, tensor, tp, t) for key, tensor in whole.items() if "experts" not in key}
        for layer in range(2):
            for number in range(local):
                for fc in (1, 2):
                    key = name(layer, e * local + number, fc)
                    parts = expert_tp or tp
                    state[name(layer, number, fc)] = shard(key, whole[key], parts, t % parts)
        more = {} if expert_tp is None else {"expert_tensor_parallel_size": expert_tp}
        write(tmp_path, (t, e), state, sizes(tp, 1, ep, **more) if recorded else None)
    reader = LegacyReader(tmp_path, merged)
    assert reader.weight_keys == whole.keys()
    for key, tensor in whole.items():
        # Asked for by megatron-core's names of local layers, whichever the checkpoint has.
        asked = re.sub(r"experts\.(linear_fc\d\.weight)(\d+)", r"experts.local_experts.\2.\1", key)
        assert reader.find(asked).keys == (key,) and torch.equal(reader.load(asked), tensor), key


def test_three_numbers_are_tensor_pipeline_and_expert_rank(tmp_path, random_tensor):
    whole = {EMBEDDING: random_tensor(8, 4)}
    whole |= {QKV.format(layer): random_tensor(12, 4) for layer in range(2)}
    whole |= {EXPERT.format(layer, expert, 1): random_tensor(12, 4) for layer in range(2) for expert in range(2)}
    for t in range(2):
        for p in range(2):
            for e in range(2):
                state = {QKV.format(0): shard(QKV, whole[QKV.format(p)], 2, t)}
                expert = EXPERT.format(p, e, 1)
                state[EXPERT.format(0, 0, 1)] = shard(expert, whole[expert], 2, t)
                if p == 0:
                    state[EMBEDDING] = shard(EMBEDDING, whole[EMBEDDING], 2, t)
                write(tmp_path, (t, p, e), state, sizes(2, 2, 2))
    reader = LegacyReader(tmp_path, merged)
    assert reader.weight_keys == whole.keys()
    for key, tensor in whole.items():
        assert torch.equal(reader.load(key), tensor)
        assert (reader.shape(key), reader.dtype(key)) == (tuple(tensor.shape), torch.float32)


def test_without_arguments_stages_are_told_from_experts_by_the_embedding(tmp_path, random_tensor):
    layers = [random_tensor(12, 4) for _ in range(2)]
    write(tmp_path, (0, 0), {EMBEDDING: random_tensor(8, 4), QKV.format(0): layers[0]})
    write(tmp_path, (0, 1), {QKV.format(0): layers[1]})
    reader = LegacyReader(tmp_path, merged)
    assert reader.args() == {}
    assert [torch.equal(reader.load(QKV.format(i)), layers[i]) for i in range(2)] == [True, True]


def test_transformer_engines_names_and_wrappers_are_understood(tmp_path, random_tensor):
    norm = random_tensor(4)
    state = {
        "module.module.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": norm,
        "module.module.decoder.layers.0.self_attention.linear_qkv._extra_state": torch.zeros(3, dtype=torch.uint8),
        "module.module.decoder.layers.0.self_attention.core_attention._extra_state": None,
    }
    write(tmp_path, (0,), state)
    reader = LegacyReader(tmp_path, merged)
    assert torch.equal(reader.load("decoder.layers.0.input_layernorm.weight"), norm)
    assert reader.weight_keys == {"decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"}
    with pytest.raises(CheckpointError, match=r"has no weight decoder\.layers\.1\.input.*\(looked for"):
        reader.load("decoder.layers.1.input_layernorm.weight")


def test_an_older_distributed_optimizers_file_name_is_known(tmp_path, random_tensor):
    tensor = random_tensor(8, 4)
    write(tmp_path, (0,), {EMBEDDING: tensor})
    directory = tmp_path / "mp_rank_00"
    (directory / "model_optim_rng.pt").rename(directory / "model_rng.pt")
    (directory / "distrib_optim.pt").write_bytes(b"never opened")
    assert torch.equal(LegacyReader(tmp_path, merged).load(EMBEDDING), tensor)


def broken(root, random_tensor, kind):
    """One way in which a checkpoint is no readable one."""
    good = {EMBEDDING: random_tensor(8, 4), FC1.format(0): random_tensor(6, 4)}
    if kind == "missing tensor rank":
        write(root, (0,), good, sizes(tp=2))
    elif kind == "missing stage":
        write(root, (0, 0), good, sizes(pp=2))
    elif kind == "missing expert rank":
        write(root, (0, 0), good, sizes(ep=2))
    elif kind == "mixed names":
        write(root, (0,), good)
        write(root, (1, 0), good)
    elif kind == "no file":
        (root / "mp_rank_00").mkdir(parents=True)
    elif kind == "no model":
        write(root, (0,), torch.zeros(1))
    elif kind == "only an optimizer":
        (root / "mp_rank_00").mkdir(parents=True)
        torch.save({"optimizer": {}}, root / "mp_rank_00" / "model_optim_rng.pt")
    elif kind == "before megatron-core":
        write(root, (0,), {"language_model": {"encoder": {}}})
    elif kind == "an older version":
        write(root, (0,), good, checkpoint_version=2.0)
    elif kind == "layers of another numbering":
        write(root, (0, 0), good, sizes(pp=2))
        write(root, (0, 1), {FC1.format(1): random_tensor(6, 4)}, sizes(pp=2))
    elif kind == "a rank without a weight":
        write(root, (0,), good, sizes(tp=2))
        write(root, (1,), {EMBEDDING: random_tensor(8, 4)}, sizes(tp=2))
    elif kind == "ranks of two runs":
        write(root, (0,), good, sizes(tp=2))
        write(root, (1,), {"model0": good, "model1": good}, sizes(tp=2))
    elif kind == "sizes that no machine has":
        write(root, (0,), good, sizes(tp=10**30, pp=10**30, ep=10**30))
    elif kind == "more stages than fit a line":
        write(root, (0, 0), good, sizes(pp=20))
    elif kind == "experts that overwrote each other":
        write(root, (0, 0), good, sizes(ep=1, expert_tensor_parallel_size=2))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("missing tensor rank", "by tensor 2 × pipeline 1 × expert 1 ranks, but has no .* of tensor rank 1 of stage 0"),
        ("missing stage", "no mp_rank_\\* directory of tensor rank 0 of stage 1"),
        ("missing expert rank", "no mp_rank_\\* directory of expert rank 1 of stage 0"),
        (
            "sizes that no machine has",
            "no mp_rank_\\* directory of tensor rank 0 of stage 1, .* of stage 8 and more; use",
        ),
        ("more stages than fit a line", "tensor rank 0 of stage 7, tensor rank 0 of stage 8 and more; use a whole"),
        ("mixed names", "it has mp_rank_00, mp_rank_01_000; use one whole checkpoint"),
        ("no file", "mp_rank_00 has no model_optim_rng.pt"),
        ("no model", "holds no state dict under 'model'"),
        ("only an optimizer", "holds no model \\(no key 'model' or 'model0'\\)"),
        ("before megatron-core", "from before megatron-core .*--use-mcore-models"),
        ("an older version", "checkpoint version 2.0; allowed: 3.0"),
        ("layers of another numbering", "stage 1 of .* has layers \\[1\\]"),
        ("a rank without a weight", "lacks shard 1 of 2 of decoder.layers.0.mlp.linear_fc1.weight"),
        ("ranks of two runs", "the ranks of .* hold \\[1, 2\\] model chunks"),
        ("experts that overwrote each other", "expert-tensor-parallel-size 2, which does not divide"),
    ],
)
def test_what_is_broken_is_told(tmp_path, random_tensor, kind, told):
    broken(tmp_path, random_tensor, kind)
    with pytest.raises(CheckpointError, match=told):
        LegacyReader(tmp_path, merged)


@pytest.mark.parametrize(
    ("name", "shards", "told"),
    [
        (EMBEDDING, [(8, 4), (8, 5)], r"\(8, 4\) of torch\.float32, \(8, 5\) of torch\.float32; use another"),
        # What torch would join without a word: rows of two counts, and two types.
        (EMBEDDING, [(8, 4), (6, 4)], r"\(8, 4\) of torch\.float32, \(6, 4\)"),
        (FC1.format(0), [(6, 4), (2, 4)], r"\(6, 4\) of torch\.float32, \(2, 4\)"),
        (EMBEDDING, [(8, 4), torch.ones(8, 4, dtype=torch.bfloat16)], r".*32, \(8, 4\) of torch\.bfloat16"),
        (ROUTER.format(0), [(8, 4), (4, 4)], r"\(8, 4\) of torch\.float32, \(4, 4\)"),
    ],
)
def test_shards_that_do_not_fit_are_told(tmp_path, random_tensor, name, shards, told):
    for rank, part in enumerate(shards):
        part = random_tensor(*part) if isinstance(part, tuple) else part
        write(tmp_path, (rank,), {name: part}, sizes(tp=2))
    reader = LegacyReader(tmp_path, merged)
    for ask in (reader.load, reader.shape):
        with pytest.raises(CheckpointError, match=rf"shards of {re.escape(name)} .* do not fit together: {told}"):
            ask(name)


def test_strange_keys_are_told_and_nothing_worse(tmp_path, random_tensor):
    """Numbers with leading zeros, and numbers that Python would refuse to read."""
    tensor, long = random_tensor(8, 4), "9" * 5000
    write(tmp_path, (0,), {EMBEDDING: tensor, f"decoder.layers.{long}.weight": tensor}, **{f"model{long}": {}})
    reader = LegacyReader(tmp_path, merged)
    assert reader.weight_keys == {EMBEDDING, f"decoder.layers.{long}.weight"}
    write(tmp_path / "zeros", (0,), {"model0": {EMBEDDING: tensor}, "model01": {"more": tensor}})
    assert LegacyReader(tmp_path / "zeros", merged).weight_keys == {EMBEDDING, "more"}
