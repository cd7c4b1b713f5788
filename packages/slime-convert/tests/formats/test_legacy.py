"""Legacy checkpoints: a real megatron-core model's, and hand-made ones, for more ranks than two and for damage."""

import argparse
import json
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_convert import ModelShape, WeightMap, hf_to_torch_dist, megatron_to_hf, torch_dist_to_hf
from slime_convert.errors import CheckpointError, OutputError, ShapeMismatchError, WeightError
from slime_convert.files.reading import TensorReader
from slime_convert.formats.legacy import LegacyWeights
from support.family_models import assert_same_weights, tree, weights_of

RANK_FILE = "mp_rank_00/model_optim_rng.pt"


@pytest.mark.parametrize(
    ("model", "directories"),
    [
        ("llama-tied", {"mp_rank_00"}),
        ("qwen3-untied", {"mp_rank_00", "mp_rank_01"}),
        ("qwen3-tied", {"mp_rank_00_000", "mp_rank_00_001"}),
        ("llama3-scaled", {"mp_rank_00_000", "mp_rank_00_001"}),
    ],
    ids=["one-rank", "tensor-parallel", "pipeline-uneven", "pipeline-virtual"],
)
def test_what_megatron_wrote_is_the_model_it_came_from(legacy_runs, tmp_path, model, directories):
    run = legacy_runs[model]
    assert {path.parent.name for path in run.save.rglob("model_optim_rng.pt")} == directories
    calls = []
    done = megatron_to_hf(run.save, tmp_path / "hf", run.origin, on_progress=lambda *call: calls.append(call))
    assert (done.copied, done.notes) == ((), ())
    assert_same_weights(tmp_path / "hf", run.origin)
    assert (tmp_path / "hf" / "config.json").read_bytes() == (run.origin / "config.json").read_bytes()
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    assert calls == sorted(calls) and calls[-1][0] == calls[-1][1] > 0


@pytest.mark.parametrize("where", ["iter_0000005", "release", "."])
def test_an_iteration_its_parent_or_release(legacy_runs, tmp_path, where):
    run = legacy_runs["llama-tied"]
    shutil.copytree(run.save, tmp_path / "legacy")
    if where == "release":
        (tmp_path / "legacy" / "iter_0000005").rename(tmp_path / "legacy" / "release")
        (tmp_path / "legacy" / "latest_checkpointed_iteration.txt").write_text("release\n")
        megatron_to_hf(tmp_path / "legacy", tmp_path / "parent", run.origin)
    megatron_to_hf(tmp_path / "legacy" / where, tmp_path / "hf", run.origin)
    assert_same_weights(tmp_path / "hf", run.origin)


class Hostile:
    def __init__(self, mark):
        self._mark = mark

    def __reduce__(self):
        return (os.system, (f"touch {self._mark}",))


def edited(run, target, edit):
    """A copy of a run's checkpoint, whose first rank's file has been changed."""
    shutil.copytree(run.save, target)
    path = target / "iter_0000005" / RANK_FILE
    state = torch.load(path, weights_only=False)
    edit(state)
    torch.save(state, path)
    return target


@pytest.mark.parametrize("place", ["args", "optimizer", "rng_state"])
def test_a_hostile_pickle_beside_the_model_runs_nothing(legacy_runs, tmp_path, place):
    run, hostile = legacy_runs["llama-tied"], Hostile(tmp_path / "mark")

    def edit(state):
        if place == "args":
            state["args"].extra = hostile
        elif place == "optimizer":
            state["optimizer"]["optimizer"]["state"][0]["exp_avg"] = hostile
        else:
            state["rng_state"] = hostile

    megatron_to_hf(edited(run, tmp_path / "legacy", edit), tmp_path / "hf", run.origin)
    assert_same_weights(tmp_path / "hf", run.origin)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda s, h: s.update(model=h), "holds no state dict under 'model'"),
        (lambda s, h: s["model"].update({"decoder.final_layernorm.weight": h}), "which is not a plain tensor"),
        (lambda s, h: s.update(args=h, model=h), "holds no state dict"),
        (lambda s, h: s["model"].update({"more.weight": torch.zeros(1)}), "1 weights that the given .* more.weight"),
        (lambda s, h: s["model"].pop("decoder.final_layernorm.weight"), "has no weight decoder.final_layernorm"),
        (lambda s, h: setattr(s["args"], "hidden_size", 48), r"hidden_size 48 \(config: 24\)"),
        (lambda s, h: setattr(s["args"], "tensor_model_parallel_size", 2), "no mp_rank.* of tensor rank 1"),
    ],
    ids=["model", "weight", "both", "unknown", "absent", "other-model", "rank"],
)
def test_what_is_wrong_inside_is_refused_and_nothing_is_left(legacy_runs, tmp_path, edit, words):
    run = legacy_runs["llama-tied"]
    edited(run, tmp_path / "legacy", lambda state: edit(state, Hostile(tmp_path / "mark")))
    with pytest.raises((CheckpointError, ShapeMismatchError), match=words):
        megatron_to_hf(tmp_path / "legacy", tmp_path / "hf", run.origin)
    assert [path.name for path in tmp_path.iterdir()] == ["legacy"]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-5000])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda root: truncate(root / "iter_0000005" / RANK_FILE), "cannot read .*model_optim_rng.pt"),
        (lambda root: shutil.rmtree(root / "iter_0000005" / "mp_rank_01"), "no mp_rank.* of tensor rank 1 of stage 0"),
        (lambda root: shutil.rmtree(root / "iter_0000005"), "names iter_0000005, but that has no mp_rank"),
        (lambda root: (root / "latest_checkpointed_iteration.txt").write_text("x"), "'x'; it must be 'release' or a"),
        (
            lambda root: (root / "latest_checkpointed_iteration.txt").unlink(),
            "is not a checkpoint of a known format; give one of",
        ),
        (lambda root: shutil.rmtree(root), "there is no .*legacy; give a checkpoint: torch .*; torch_dist"),
    ],
    ids=["truncated", "rank", "iteration", "tracker", "no-tracker", "nothing"],
)
def test_a_damaged_checkpoint_is_refused_and_nothing_is_left(legacy_runs, tmp_path, damage, words):
    run = legacy_runs["qwen3-untied"]
    shutil.copytree(run.save, tmp_path / "legacy")
    damage(tmp_path / "legacy")
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        megatron_to_hf(tmp_path / "legacy", tmp_path / "hf", run.origin)
    assert tree(tmp_path) == before


def test_a_flipped_byte_is_noticed_and_nothing_is_left(legacy_runs, tmp_path):
    run = legacy_runs["llama-tied"]
    shutil.copytree(run.save, tmp_path / "legacy")
    path = tmp_path / "legacy" / "iter_0000005" / RANK_FILE
    norm = torch.load(path, weights_only=False)["model"]["decoder.final_layernorm.weight"]
    data = bytearray(path.read_bytes())
    data[data.index(norm.view(torch.uint8).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"is damaged: the checksum"):
        megatron_to_hf(tmp_path / "legacy", tmp_path / "hf", run.origin)
    assert [path.name for path in tmp_path.iterdir()] == ["legacy"]


def test_another_format_and_another_origin_are_refused(legacy_runs, one_converted, one_origin, tmp_path):
    run = legacy_runs["llama-tied"]
    with pytest.raises(ShapeMismatchError, match=r"was written by another model than the given Hugging Face config"):
        megatron_to_hf(run.save, tmp_path / "hf", legacy_runs["qwen3-untied"].origin)
    with pytest.raises(ShapeMismatchError, match="--num-layers 7"):
        megatron_to_hf(run.save, tmp_path / "hf", run.origin, flags={"num_layers": 7})
    td = shutil.copytree(one_converted, tmp_path / "td")
    (td / "release" / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(CheckpointError, match="format 'zarr'; allowed: 'torch' and 'torch_dist'"):
        megatron_to_hf(td, tmp_path / "hf", one_origin)
    with pytest.raises(OutputError, match="is or holds the input"):
        megatron_to_hf(run.save / "iter_0000005", run.save, run.origin, force=True)
    assert not (tmp_path / "hf").exists()


def test_optimizer_state_stays_on_disk(legacy_runs, tmp_path):
    """Adam's moments, most of the file, are overwritten: reading them would show a wrong checksum."""
    run = legacy_runs["llama-tied"]
    path = run.save / "iter_0000005" / RANK_FILE
    state = torch.load(path, weights_only=False)
    moments = [value for entry in state["optimizer"]["optimizer"]["state"].values() for value in entry.values()]
    moments = [tensor for tensor in moments if tensor.dim()]
    assert sum(tensor.nbytes for tensor in moments) > path.stat().st_size / 3
    data = bytearray(path.read_bytes())
    for tensor in moments:
        at = data.index(tensor.numpy().tobytes())
        data[at : at + tensor.nbytes] = bytes(tensor.nbytes)
    shutil.copytree(run.save, tmp_path / "legacy")
    (tmp_path / "legacy" / "iter_0000005" / RANK_FILE).write_bytes(data)
    megatron_to_hf(tmp_path / "legacy", tmp_path / "hf", run.origin)
    assert_same_weights(tmp_path / "hf", run.origin)


def test_an_output_layer_that_a_tied_model_stores_must_be_the_embedding(legacy_runs, tmp_path):
    """The last stage of a tied model stores the embedding a second time; another one would be lost."""
    run = legacy_runs["qwen3-tied"]
    shutil.copytree(run.save, tmp_path / "legacy")
    path = tmp_path / "legacy" / "iter_0000005" / "mp_rank_00_001" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    state["model"]["output_layer.weight"][101:] += 1  # padding
    torch.save(state, path)
    megatron_to_hf(tmp_path / "legacy", tmp_path / "hf", run.origin)
    state["model"]["output_layer.weight"][100, 5] += 1
    torch.save(state, path)
    with pytest.raises(CheckpointError, match=r"output_layer\.weight of .* differs from embedding\..* tie_word_embed"):
        megatron_to_hf(tmp_path / "legacy", tmp_path / "other", run.origin)
    assert not (tmp_path / "other").exists()


class TestMissingWeights:
    @pytest.fixture
    def origin_with_more(self, one_origin, tmp_path):
        """The original model with a part that Megatron does not train."""
        path = shutil.copytree(one_origin, tmp_path / "with-more")
        index = path / "model.safetensors.index.json"
        record = json.loads(index.read_text())
        record["weight_map"] |= {"visual.proj.weight": "more.safetensors"}
        save_file({"visual.proj.weight": torch.ones(2, 3)}, path / "more.safetensors")
        index.write_text(json.dumps(record))
        return path

    @pytest.mark.parametrize("convert", [torch_dist_to_hf, megatron_to_hf])
    def test_they_come_from_the_origin(self, one_origin, origin_with_more, one_converted, tmp_path, convert):
        plain = weights_of(one_origin)
        assert convert(one_converted, tmp_path / "plain", origin_with_more).copied == ()
        assert_same_weights(tmp_path / "plain", plain)
        done = convert(one_converted, tmp_path / "hf", origin_with_more, add_missing_from_origin_hf=True)
        assert done.copied == ("visual.proj.weight",) and done.num_weights == len(plain) + 1
        assert_same_weights(tmp_path / "hf", plain | {"visual.proj.weight": torch.ones(2, 3)})

    def test_one_that_the_checkpoint_lacks(self, legacy_runs, tmp_path):
        run = legacy_runs["llama-tied"]
        edited(run, tmp_path / "legacy", lambda state: state["model"].pop("decoder.layers.1.mlp.linear_fc1.weight"))
        done = megatron_to_hf(tmp_path / "legacy", tmp_path / "hf", run.origin, add_missing_from_origin_hf=True)
        assert done.copied == ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight")
        assert_same_weights(tmp_path / "hf", run.origin)

    def test_a_quantized_part_of_the_origin_is_not_copied(self, origin_with_more, one_converted, tmp_path):
        """It would need its scales, and the config would have to say so."""
        more = load_file(origin_with_more / "more.safetensors")
        more["visual.proj.weight"] = more["visual.proj.weight"].to(torch.float8_e4m3fn)
        save_file(more, origin_with_more / "more.safetensors")
        with pytest.raises(WeightError, match=r"visual\.proj\.weight of .* has type float8_e4m3fn"):
            megatron_to_hf(one_converted, tmp_path / "hf", origin_with_more, add_missing_from_origin_hf=True)
        assert not (tmp_path / "hf").exists()

    def test_what_cannot_be_copied(self, legacy_runs, tmp_path):
        run = legacy_runs["llama-tied"]
        edited(run, tmp_path / "legacy", lambda state: state["model"].pop("decoder.final_layernorm.weight"))
        weights = weights_of(run.origin)
        del weights["model.norm.weight"]
        (tmp_path / "origin").mkdir()
        save_file(weights, tmp_path / "origin" / "model.safetensors")
        shutil.copy(run.origin / "config.json", tmp_path / "origin")
        with pytest.raises(WeightError, match=r"has no weight model\.norm\.weight"):
            megatron_to_hf(tmp_path / "legacy", tmp_path / "hf", tmp_path / "origin", add_missing_from_origin_hf=True)
        edited(run, tmp_path / "empty", lambda state: state.update(model={"other": torch.zeros(1)}))
        with pytest.raises(CheckpointError, match="has 1 weights that the given Hugging Face config does not describe"):
            megatron_to_hf(tmp_path / "empty", tmp_path / "hf", run.origin, add_missing_from_origin_hf=True)
        assert not (tmp_path / "hf").exists()


def test_all_formats_give_the_same(legacy_runs, tmp_path):
    run = legacy_runs["qwen3-tied"]
    hf_to_torch_dist(run.origin, tmp_path / "torch_dist")
    megatron_to_hf(tmp_path / "torch_dist", tmp_path / "a", run.origin)
    megatron_to_hf(run.save, tmp_path / "b", run.origin)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


LAYER = "decoder.layers.{}."
QKV = LAYER + "self_attention.linear_qkv.weight"
FC1 = LAYER + "mlp.linear_fc1.weight"
ROUTER = LAYER + "mlp.router.weight"
EXPERT = LAYER + "mlp.experts.local_experts.{}.linear_fc{}.weight"
EMBEDDING = "embedding.word_embeddings.weight"


def write(root, numbers, model, args=None, **more):
    directory = root / "_".join(["mp_rank", f"{numbers[0]:02d}", *(f"{number:03d}" for number in numbers[1:])])
    directory.mkdir(parents=True)
    models = model if isinstance(model, dict) and "model0" in model else {"model": model}
    state = {"checkpoint_version": 3.0, "iteration": 1, **models} | more
    if args is not None:
        state["args"] = argparse.Namespace(**args)
    torch.save(state, directory / "model_optim_rng.pt")


def load(weights, name):
    with TensorReader() as reader:
        tensor = reader.load(weights.tensor(name))
        reader.finish()
    return tensor


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


# Tensor-, expert- and the experts' own tensor-parallel size, which only the arguments say; whether they are recorded.
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
def test_experts_have_their_numbers_in_the_whole_model(tmp_path, layout, grouped):
    tp, ep, expert_tp, recorded = layout
    shape = ModelShape(
        family="qwen3_moe",
        num_layers=2,
        hidden_size=4,
        ffn_hidden_size=4,
        num_attention_heads=2,
        num_query_groups=2,
        kv_channels=2,
        vocab_size=8,
        max_position_embeddings=8,
        num_experts=8,
        moe_ffn_hidden_size=6,
        moe_router_topk=2,
        qk_layernorm=True,
    )
    weight_map, local = WeightMap(shape), 8 // ep
    whole = {name: torch.randn(weight_map.megatron_shape(name)) for name in weight_map.megatron_names()}
    # Of all pairs of a tensor rank and an expert rank, those that exist: with experts whole, ranks count through both.
    for t, e in [(t, e) for t in range(tp) for e in range(ep) if expert_tp is None or e % tp == t]:
        state = {}
        for name, tensor in whole.items():
            expert = weight_map.expert(name)
            parts = tp if expert is None else expert_tp or tp
            if expert is not None and expert // local != e:
                continue
            key = weight_map.te_name(name) if grouped else name
            if expert is not None:
                number = str(expert % local)
                key = re.sub(r"\d+$", number, key) if grouped else re.sub(r"(experts\.)\d+", rf"\g<1>{number}", key)
            state[key] = weight_map.split_tp(name, tensor, parts)[t % parts].clone()
        more = {} if expert_tp is None else {"expert_tensor_parallel_size": expert_tp}
        write(tmp_path, (t, e), state, sizes(tp, 1, ep, **more) if recorded else None)
    weights = LegacyWeights(tmp_path)
    assert weights.named(weight_map).keys() == whole.keys()
    assert not [name for name, tensor in whole.items() if not torch.equal(load(weights, name), tensor)]


def test_three_numbers_are_tensor_pipeline_and_expert_rank(tmp_path, random_tensor):
    whole = {EMBEDDING: random_tensor(8, 4)} | {ROUTER.format(layer): random_tensor(8, 4) for layer in range(2)}
    whole |= {EXPERT.format(layer, expert, 1): random_tensor(6, 4) for layer in range(2) for expert in range(2)}
    for t in range(2):
        for p in range(2):
            for e in range(2):
                state = {ROUTER.format(0): whole[ROUTER.format(p)]}
                state[EXPERT.format(0, 0, 1)] = whole[EXPERT.format(p, e, 1)]
                if p == 0:
                    state[EMBEDDING] = whole[EMBEDDING].chunk(2)[t].clone()
                write(tmp_path, (t, p, e), state, sizes(2, 2, 2, expert_tensor_parallel_size=1))
    weights = LegacyWeights(tmp_path)
    assert weights.tensors.keys() == whole.keys()
    assert torch.equal(load(weights, EMBEDDING), whole[EMBEDDING])
    for name, tensor in whole.items():
        if "experts" in name:
            assert torch.equal(load(weights, name), tensor)


def test_without_arguments_stages_are_known_from_experts_by_the_embedding(tmp_path, random_tensor):
    layers = [random_tensor(12, 4) for _ in range(2)]
    write(tmp_path, (0, 0), {EMBEDDING: random_tensor(8, 4), QKV.format(0): layers[0]})
    write(tmp_path, (0, 1), {QKV.format(0): layers[1]})
    weights = LegacyWeights(tmp_path)
    assert weights.arguments == {}
    assert [torch.equal(load(weights, QKV.format(i)), layers[i]) for i in range(2)] == [True, True]


def test_transformer_engines_names_and_wrappers_are_understood(tmp_path, random_tensor):
    norm = random_tensor(4)
    state = {
        "module.module.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": norm,
        "module.module.decoder.layers.0.self_attention.linear_qkv._extra_state": torch.zeros(3, dtype=torch.uint8),
        "module.module.decoder.layers.0.self_attention.core_attention._extra_state": None,
    }
    write(tmp_path, (0,), state)
    weights = LegacyWeights(tmp_path)
    assert torch.equal(load(weights, "decoder.layers.0.input_layernorm.weight"), norm)
    assert weights.tensors.keys() == {"decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"}
    with pytest.raises(CheckpointError, match=r"has no weight decoder\.layers\.1\.input"):
        weights.tensor("decoder.layers.1.input_layernorm.weight")


def test_an_older_distributed_optimizers_file_name_is_known(tmp_path, random_tensor):
    tensor = random_tensor(8, 4)
    write(tmp_path, (0,), {EMBEDDING: tensor})
    directory = tmp_path / "mp_rank_00"
    (directory / "model_optim_rng.pt").rename(directory / "model_rng.pt")
    (directory / "distrib_optim.pt").write_bytes(b"never opened")
    assert torch.equal(load(LegacyWeights(tmp_path), EMBEDDING), tensor)


def broken(root, random_tensor, kind):
    """One way in which a checkpoint cannot be read."""
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


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing tensor rank", "by tensor 2 × pipeline 1 × expert 1 ranks, but has no .* of tensor rank 1 of stage 0"),
        ("missing stage", "no mp_rank_\\* directory of tensor rank 0 of stage 1"),
        ("missing expert rank", "no mp_rank_\\* directory of expert rank 1 of stage 0"),
        ("sizes that no machine has", "no mp_rank_\\* directory of tensor rank 1 of stage 0, .* and more; use"),
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
def test_what_is_broken_is_refused(tmp_path, random_tensor, kind, words):
    broken(tmp_path, random_tensor, kind)
    with pytest.raises(CheckpointError, match=words):
        LegacyWeights(tmp_path)


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        ([(8, 4), (8, 5)], r"\(8, 4\) of float32, \(8, 5\) of float32; use another"),
        # What could be joined: rows of two counts, and two types.
        ([(8, 4), (6, 4)], r"\(8, 4\) of float32, \(6, 4\)"),
        ([(8, 4), torch.ones(8, 4, dtype=torch.bfloat16)], r".*32, \(8, 4\) of bfloat16"),
    ],
)
def test_shards_that_do_not_fit(tmp_path, random_tensor, shards, words):
    for rank, part in enumerate(shards):
        part = random_tensor(*part) if isinstance(part, tuple) else part
        write(tmp_path, (rank,), {EMBEDDING: part}, sizes(tp=2))
    with pytest.raises(CheckpointError, match=rf"shards of {EMBEDDING} .* do not fit together: {words}"):
        LegacyWeights(tmp_path).tensor(EMBEDDING)


def test_strange_keys_do_no_harm(tmp_path, random_tensor):
    """Numbers with leading zeros, and numbers that Python would refuse to read."""
    tensor, long = random_tensor(8, 4), "9" * 5000
    write(tmp_path, (0,), {EMBEDDING: tensor, f"decoder.layers.{long}.weight": tensor}, **{f"model{long}": {}})
    assert LegacyWeights(tmp_path).tensors.keys() == {EMBEDDING, f"decoder.layers.{long}.weight"}
    write(tmp_path / "zeros", (0,), {"model0": {EMBEDDING: tensor}, "model01": {"more": tensor}})
    assert LegacyWeights(tmp_path / "zeros").tensors.keys() == {EMBEDDING, "more"}
