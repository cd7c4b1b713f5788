"""A run continues from its checkpoint as if it had never stopped, at any parallel size."""

import dataclasses
import io
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from slime_core.config import AlgorithmConfig
from slime_megatron.checkpoints.contents import naming_failures
from slime_megatron.checkpoints.find import TRACKER, check_checkpoint
from slime_megatron.errors import TrainerCheckpointError

ALGORITHM = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")
LAYOUTS = {
    "one rank": (1, {}),
    "one rank, bf16": (1, {"bf16": True}),
    "dp2 + distributed optimizer": (2, {"use_distributed_optimizer": True}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
}


def rollouts(make_samples, make_shards, world, values):
    """Three different rollouts of two steps."""
    data_parallel = world // values.get("tensor_model_parallel_size", 1)
    return [
        make_shards(make_samples(seed=seed), data_parallel=data_parallel, steps=2, rollout_id=seed) for seed in range(3)
    ]


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=[] if "," in layout or "+" in layout else pytest.mark.full) for layout in LAYOUTS],
)
def test_a_resumed_run_equals_one_that_never_stopped(
    ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path, layout
):
    world, values = LAYOUTS[layout]
    model = tiny_model("qwen3")
    config = tiny_config(
        load=model.checkpoint,
        save=str(tmp_path),
        lr_warmup_iters=3,
        lr_decay_iters=20,
        lr_decay_style="cosine",
        **values,
    )
    first, second, third = rollouts(make_samples, make_shards, world, values)
    ranks.start(world, config, model.shape, ALGORITHM)
    ranks.call("train", first)
    directory = ranks.first("save", 1)
    assert ranks.call("children") == [[]] * world
    expected = [ranks.first("train", shards).steps for shards in (second, third)]
    weights = ranks.first("weights")

    assert Path(directory).name == "iter_0000001"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", "latest_checkpointed_iteration.txt"]
    for weights_first in (False, True):
        ranks.start(world, config, model.shape, ALGORITHM, resume_from=str(tmp_path), weights_first=weights_first)
        assert ranks.iteration == 1
        assert [ranks.first("train", shards).steps for shards in (second, third)] == expected
        assert all(np.array_equal(value, weights[key]) for key, value in ranks.first("weights").items())


@pytest.mark.parametrize("call", ["finish_loading", "save", "sleep", "forward"])
def test_what_is_left_for_later_comes_with_the_first_call_that_needs_it(
    ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path, call
):
    """Weights can be sent before, and an optimizer that is damaged is named by that call, and again by the next."""
    model = tiny_model("qwen3")
    config, shards = tiny_config(load=model.checkpoint, save=str(tmp_path)), make_shards(make_samples())
    arguments = {"save": (2,), "forward": (shards, "reference")}.get(call, ())
    ranks.start(1, config, model.shape, ALGORITHM)
    ranks.call("train", shards)
    ranks.call("save", 1)
    weights, values = ranks.first("weights"), ranks.first("forward", shards)
    ranks.start(1, config, model.shape, ALGORITHM, resume_from=str(tmp_path), weights_first=True)
    assert ranks.iteration == 1
    assert all(np.array_equal(value, weights[key]) for key, value in ranks.first("weights").items())
    assert all(map(np.array_equal, ranks.first("forward", shards), values))
    assert ranks.first("has_left") == [True, False]
    (tmp_path / TRACKER).write_text("9")  # what is left is of the checkpoint that was begun, not of the newest
    [file] = tmp_path.glob("iter_0000001/*.distcp")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    for _ in range(2):
        assert ranks.first("error_of", call, *arguments).startswith(
            "TrainerCheckpointError: cannot read the checkpoint"
        )
    file.write_bytes(whole)
    ranks.call(call, *arguments)
    assert ranks.first("has_left") == [False, True]


def test_random_states_continue(ranks, tiny_model, tiny_config, tmp_path):
    model = tiny_model("qwen3")
    config = tiny_config(load=model.checkpoint, save=str(tmp_path))
    ranks.start(1, config, model.shape, ALGORITHM)
    ranks.call("random_numbers")
    ranks.call("save", 1)
    expected = ranks.first("random_numbers")
    ranks.start(1, config, model.shape, ALGORITHM, resume_from=str(tmp_path))
    assert ranks.first("random_numbers") == expected


@pytest.mark.parametrize("distributed", [False, True])
def test_a_checkpoint_may_be_taken_before_the_first_step(
    ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path, distributed
):
    model = tiny_model("qwen3")
    config = tiny_config(load=model.checkpoint, save=str(tmp_path), use_distributed_optimizer=distributed)
    shards = make_shards(make_samples())
    ranks.start(1, config, model.shape)
    ranks.call("save", 0)
    expected = ranks.first("train", shards).steps
    ranks.start(1, config, model.shape, resume_from=str(tmp_path))
    assert ranks.first("train", shards).steps == expected


def test_the_halves_of_a_gated_layer_are_read_into_their_places(ranks, tiny_model, tiny_config, tmp_path):
    model = tiny_model("qwen3")
    config = tiny_config(load=model.checkpoint, save=str(tmp_path))
    ranks.start(1, config, model.shape)
    ranks.call("save", 1)
    weights = ranks.first("weights")
    assert ranks.first("joins_while_loading", str(tmp_path)) == 0
    assert all(np.array_equal(value, weights[key]) for key, value in ranks.first("weights").items())


def test_what_cannot_be_continued_is_named(
    ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path, rank_error
):
    model = tiny_model("qwen3")
    ranks.start(1, tiny_config(save=str(tmp_path), no_save_optim=True), model.shape)
    ranks.call("save", 1)
    with pytest.raises(rank_error, match="holds no optimizer state"):
        ranks.start(1, tiny_config(), model.shape, resume_from=str(tmp_path))
    with pytest.raises(rank_error, match=r"by another model .*qk_layernorm True \(config: False\)"):
        ranks.start(1, tiny_config(load=str(tmp_path)), tiny_model("llama-tied").shape)


def test_a_checkpoint_of_another_shape_is_named_before_and_at_the_start(
    ranks, tiny_model, tiny_config, tmp_path, rank_error
):
    """All that differs, in one line: what leaves tensors as they are, and what does not; no check of files follows."""
    model = tiny_model("deepseek")
    others = {
        "moe_router_topk": 1,
        "moe_router_topk_scaling_factor": 3.5,
        "num_experts": 16,
        "rotary_scaling_factor": 7,
    }
    wrong = {name: getattr(model.shape, name) for name in others}
    other = dataclasses.replace(model.shape, **others)
    assert all(others[name] != value for name, value in wrong.items())
    for directory in (model.checkpoint, model.hf_directory):
        check_checkpoint(directory, model.shape)
        with pytest.raises(TrainerCheckpointError) as caught:
            check_checkpoint(directory, other)
        with pytest.raises(rank_error) as refused:
            ranks.start(1, tiny_config(load=directory), other)
        for message in (str(caught.value), refused.value.text):
            assert "\n" not in message and "by another model than the given Hugging Face config" in message
            for name, value in wrong.items():
                assert f"{name} {value} (config: {others[name]})" in message


def test_a_checkpoint_may_lack_the_prediction_modules_of_the_config(tiny_model):
    model = tiny_model("deepseek")
    check_checkpoint(model.checkpoint, dataclasses.replace(model.shape, mtp_num_layers=1))


def cut_off(data):
    return data[:100]


def cut_in_a_number(data):
    """With a pickle that ends within a number of four bytes."""
    whole, changed = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
    with zipfile.ZipFile(changed, "w") as file:
        for name in whole.namelist():
            file.writestr(name, b"\x80\x02}r\0" if name.endswith("data.pkl") else whole.read(name))
    return changed.getvalue()


def flipped(data):
    """With a bit of a weight flipped, which torch's own reader takes."""
    at = data.index(b"ZZZZZZZZ") + 1000  # torch's padding before a tensor's bytes
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("common.pt", cut_off),
        ("common.pt", cut_in_a_number),
        (".metadata", cut_off),
        ("__0_0.distcp", cut_off),
        ("__0_0.distcp", flipped),
    ],
)
def test_a_damaged_checkpoint_is_named(ranks, tiny_model, tiny_config, tmp_path, rank_error, name, damage):
    model = tiny_model("qwen3")
    copy = shutil.copytree(model.checkpoint, tmp_path / "copy")
    [damaged] = copy.rglob(name)
    damaged.write_bytes(damage(damaged.read_bytes()))
    with pytest.raises(
        rank_error, match=r"cannot read .*; (give one that is whole|the checkpoint is damaged)"
    ) as caught:
        ranks.start(1, tiny_config(load=str(copy)), model.shape)
    assert caught.value.kind == "TrainerCheckpointError"
    assert "\n" not in caught.value.text


class Planted:
    """What a stranger puts in front of a checkpoint's description: a call."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_checkpoint_runs_no_code(ranks, tiny_model, tiny_config, tmp_path, rank_error):
    model = tiny_model("qwen3")
    copy = shutil.copytree(model.checkpoint, tmp_path / "copy")
    [described] = copy.rglob(".metadata")
    # Its object is taken away again, so that torch finds what it looks for.
    call = pickle.dumps(Planted(tmp_path / "ran"), 4)[:-1] + b"0"
    described.write_bytes(call + described.read_bytes()[2:])
    with pytest.raises(TrainerCheckpointError, match=r"\.metadata names _?io open, which describes no checkpoint"):
        check_checkpoint(copy, model.shape)
    with pytest.raises(rank_error, match=r"names _?io open, which describes no checkpoint and may run code") as caught:
        ranks.start(1, tiny_config(load=str(copy)), model.shape)
    assert caught.value.kind == "TrainerCheckpointError" and not (tmp_path / "ran").exists()
    pickle.loads(described.read_bytes())
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("cause", [ValueError("Unknown endianness type: x"), IndexError("list index out of range")])
def test_what_torch_raises_over_damaged_files_is_one_line(cause):
    said = f"^cannot read it: {cause}; give another$"
    with pytest.raises(TrainerCheckpointError, match=said), naming_failures("cannot read it", "give another"):
        raise cause
