"""A copied command means what it meant: what is left open follows from the other flags, the machine and the files."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from slime_convert.quantize import Fp8Format
from slime_core.errors import ConfigError, SlimeError
from slime_launch import derived
from slime_launch import flags as launch_flags
from slime_launch.derived import SLOW_BF16, computes_bfloat16, engine_dtype, global_batch_size, precision_notes
from slime_launch.flags import parse_train, read_train
from slime_launch.plan.engines import engine_weights
from slime_launch.preflight import preflight
from slime_launch.resume import start_notes


@pytest.fixture
def on_cuda(monkeypatch):
    monkeypatch.setattr(launch_flags, "run_device", lambda: "cuda")


@pytest.fixture
def small(flags):
    """Two rollouts of 4 prompts with 4 samples each."""
    flags.pop("--global-batch-size", None)
    flags.pop("--num-steps-per-rollout", None)
    return flags | {"--rollout-batch-size": "4", "--n-samples-per-prompt": "4", "--num-rollout": "2"}


def test_a_batch_size_alone_says_the_number_of_steps(small, to_words):
    settings = parse_train(to_words(small | {"--global-batch-size": "8"}))
    assert settings.run.num_steps_per_rollout == 2
    assert global_batch_size(settings) == 8
    assert "num_steps_per_rollout" not in settings.origins
    odd = read_train(to_words(small | {"--global-batch-size": "6"}))[0]
    with pytest.raises(
        ConfigError, match=r"\(4\) × n_samples_per_prompt \(4\) = 16 must .*\(6\) .* \(1\); set --global-batch-size 16$"
    ):
        global_batch_size(odd)
    both = read_train(to_words(small | {"--global-batch-size": "8", "--num-steps-per-rollout": "1"}))[0]
    with pytest.raises(
        ConfigError, match=r"= 16 must equal global_batch_size \(8\) × num_steps_per_rollout \(1\); set --gl"
    ):
        global_batch_size(both)


@pytest.mark.parametrize(
    ("given", "iters"),
    [
        ({}, None),
        ({"--lr-decay-style": "cosine"}, 2),
        ({"--lr-decay-style": "linear", "--global-batch-size": "4"}, 8),
        ({"--lr-warmup-fraction": "0.5"}, 2),
        ({"--lr-decay-style": "cosine", "--lr-decay-iters": "7"}, 7),
        ({"--lr-decay-style": "constant"}, None),
    ],
)
def test_a_learning_rate_decays_over_the_whole_run(small, to_words, given, iters):
    assert parse_train(to_words(small | given)).megatron.lr_decay_iters == iters


def test_precision_follows_the_machine_unless_it_is_given(small, to_words):
    settings = parse_train(to_words(small))
    assert (settings.megatron.bf16, settings.megatron.use_distributed_optimizer) == (False, False)
    [note] = precision_notes(settings.megatron, settings.origins)
    assert note == "computes in fp32, the default without CUDA; --bf16 changes that"


@pytest.mark.parametrize(("able", "notes"), [(True, []), (False, [SLOW_BF16])])
def test_bf16_that_the_processor_does_not_compute_is_said(small, to_words, monkeypatch, able, notes):
    monkeypatch.setattr(derived, "computes_bfloat16", lambda: able)
    settings = parse_train([*to_words(small), "--bf16"])
    assert precision_notes(settings.megatron, settings.origins) == notes


def test_what_a_processor_computes_is_read_from_the_kernel(tmp_path):
    file = tmp_path / "cpuinfo"
    assert computes_bfloat16(file)  # not known
    for flags, able in (("fpu avx2", False), ("fpu avx512_bf16 avx2", True), ("amx_bf16", True)):
        file.write_text(f"processor\t: 0\nmodel name\t: some flags\nflags\t\t: {flags}\n")
        assert computes_bfloat16(file) == able


@pytest.mark.usefixtures("on_cuda")
def test_on_cuda_it_is_bf16_with_the_distributed_optimizer(small, to_words):
    """What would be set there; it was not run there."""
    settings = parse_train(to_words(small))
    assert (settings.megatron.bf16, settings.megatron.use_distributed_optimizer) == (True, True)
    assert engine_dtype(settings.megatron, settings.rollout) == "bfloat16"
    [note] = precision_notes(settings.megatron, settings.origins)
    assert note == "computes in bfloat16, the default on CUDA; --fp32 changes that"
    plain = parse_train([*to_words(small), "--fp32"])
    assert (plain.megatron.bf16, plain.megatron.use_distributed_optimizer) == (False, True)
    assert engine_dtype(plain.megatron, plain.rollout) == "float32"
    whole = parse_train([*to_words(small), "--no-use-distributed-optimizer"])
    assert (whole.megatron.bf16, whole.megatron.use_distributed_optimizer) == (True, False)


def test_the_optimizer_is_either_split_or_whole(small, to_words):
    with pytest.raises(ConfigError, match="--no-use-distributed-optimizer contradict each other"):
        parse_train([*to_words(small), "--use-distributed-optimizer", "--no-use-distributed-optimizer"])


@pytest.mark.parametrize(
    ("given", "gpus"),
    [
        ({"--num-rollout": "0"}, 1),
        ({"--num-rollout": "0", "--rollout-num-gpus-per-engine": "2"}, 2),
        ({"--num-rollout": "0", "--rollout-num-gpus": "3"}, 3),
        ({"--num-rollout": "2"}, None),
        ({"--num-rollout": "0", "--rollout-external-engine-addrs": "h:1"}, None),
        ({"--debug-rollout-only": None}, 1),
    ],
)
def test_without_trainers_there_is_one_engine(small, to_words, given, gpus):
    flags = {name: value for name, value in small.items() if name not in ("--rollout-num-gpus", "--colocate")}
    assert parse_train(to_words(flags | given)).cluster.rollout_num_gpus == gpus


def test_two_precisions_contradict_each_other(small, to_words):
    with pytest.raises(ConfigError, match="--bf16 and --fp32 are two precisions"):
        parse_train([*to_words(small), "--bf16", "--fp32"])


@pytest.mark.parametrize("place", ["missing", "holds other files", "save, spelled otherwise"])
def test_without_a_checkpoint_in_load_the_run_begins_with_the_reference(flags, to_words, workspace, place):
    load = workspace / "elsewhere"
    if place == "holds other files":
        load.mkdir()
        (load / "notes.txt").write_text("no checkpoint")
    if place == "save, spelled otherwise":
        load = workspace / "hf" / ".." / "save"
    flags |= {"--load": str(load), "--ref-load": str(workspace / "dist"), "--save": str(workspace / "save")}
    checked = preflight(parse_train(to_words(flags)))
    release = str((workspace / "dist" / "release").resolve())
    assert (checked.weights.load, checked.weights.ref_load) == (release, release)
    [note] = start_notes(checked.settings.megatron, checked.manifest, checked.weights)
    assert note == f"--load {load} holds no checkpoint, so the run begins with --ref-load {release}"


def test_a_checkpoint_in_load_is_begun_with_and_a_broken_one_is_no_reason_for_another(flags, to_words, workspace):
    flags |= {"--load": str(workspace / "dist"), "--ref-load": str(workspace / "dist")}
    checked = preflight(parse_train(to_words(flags)))
    assert start_notes(checked.settings.megatron, checked.manifest, checked.weights) == []
    broken = workspace / "broken"
    broken.mkdir()
    (broken / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(SlimeError, match="iter_0000003 is not a torch_dist checkpoint"):
        preflight(parse_train(to_words(flags | {"--load": str(broken)})))


def test_a_run_begins_with_the_weights_of_a_legacy_checkpoint(flags, to_words, workspace):
    directory = workspace / "legacy" / "iter_0000007"
    (directory / "mp_rank_00").mkdir(parents=True)
    (workspace / "legacy" / "latest_checkpointed_iteration.txt").write_text("7")
    settings = parse_train(to_words(flags | {"--load": str(workspace / "legacy")}))
    with pytest.raises(SlimeError, match=r"mp_rank_00 has no model_optim_rng\.pt; .* incomplete") as caught:
        preflight(settings)
    assert "\n" not in str(caught.value)
    state = {"checkpoint_version": 3.0, "model": {"decoder.final_layernorm.weight": torch.ones(8)}}
    torch.save(state, directory / "mp_rank_00" / "model_optim_rng.pt")
    checked = preflight(settings)
    assert checked.weights.load == str(directory.resolve())
    [note] = start_notes(checked.settings.megatron, checked.manifest, checked.weights)
    assert note.endswith("is a legacy checkpoint (format torch): its weights are loaded, its optimizer is not")


def test_a_quantized_model_gives_first_weights_but_no_engines_without_a_gpu(flags, to_words, workspace):
    quantized = workspace / "fp8"
    shutil.copytree(workspace / "hf", quantized)
    config = json.loads((quantized / "config.json").read_text())
    form = Fp8Format((128, 128))
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": form.to_config([])}))
    weights = {"model.layers.0.mlp.up_proj.weight": torch.ones(8, 8).to(torch.float8_e4m3fn)}
    save_file(weights, quantized / "model.safetensors")
    checked = preflight(parse_train(to_words(flags | {"--load": str(quantized)})))
    [note] = start_notes(checked.settings.megatron, checked.manifest, checked.weights)
    assert note == f"the weights of {quantized} are quantized ({form}): training begins with what they stand for"
    settings = parse_train(to_words(flags | {"--hf-checkpoint": str(quantized)}))
    with pytest.raises(SlimeError, match=rf"{quantized} is quantized .* on GPUs alone; give it in bfloat16"):
        preflight(settings)
    assert engine_weights(settings, checked.shape) == (quantized / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("given", "background"),
    [({}, False), ({"--save": "runs"}, True), ({"--save": "runs", "--no-async-save": None}, False)],
)
def test_checkpoints_are_written_while_the_run_goes_on(small, to_words, given, background):
    assert (
        parse_train(
            to_words({name: value for name, value in small.items() if name != "--save"} | given)
        ).megatron.async_save
        is background
    )


def test_to_write_them_so_and_not_so(small, to_words):
    with pytest.raises(ConfigError, match="--async-save and --no-async-save contradict each other"):
        parse_train(to_words(small | {"--save": "runs", "--async-save": None, "--no-async-save": None}))
