import contextlib
import dataclasses
import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from slime_convert.errors import ConvertError
from slime_convert.published import PUBLISHED
from slime_convert.quantize import Fp8Format, Int4Format
from slime_core.errors import ConfigError
from slime_launch import validate
from slime_launch.cli import main
from slime_launch.derived import engine_dtype, global_batch_size, limit_threads, num_engines, num_spare_engines
from slime_launch.flags import parse_train
from slime_launch.validate import (
    check_quantized,
    check_settings,
    check_shape,
    check_whole_engines,
    hand_over_notes,
    micro_batch_notes,
    notices,
)


def settings(prompts=32, size=8, batch=None, steps=1, hf="hf", **more):
    words = ["--hf-checkpoint", str(hf), "--prompt-data", "p", "--num-rollout", "1", "--colocate", "--load", "l"]
    words += ["--rollout-batch-size", str(prompts), "--n-samples-per-prompt", str(size)]
    words += ["--num-steps-per-rollout", str(steps)]
    words += ["--global-batch-size", str(batch)] if batch else []
    for name, value in more.items():
        words += ["--" + name.replace("_", "-"), *([] if value is None else [str(value)])]
    return parse_train(words)


def test_the_issue_of_the_batch_identity_in_words():
    with pytest.raises(ConfigError) as caught:
        global_batch_size(settings(batch=128))
    assert str(caught.value) == (
        "rollout_batch_size (32) × n_samples_per_prompt (8) = 256 must equal global_batch_size (128) × "
        "num_steps_per_rollout (1); set --global-batch-size 256 or --num-steps-per-rollout 2"
    )


def test_without_a_global_batch_size_it_follows():
    assert global_batch_size(settings(steps=2)) == 128


@given(prompts=st.integers(1, 12), size=st.integers(1, 6), batch=st.integers(1, 80), steps=st.integers(1, 4))
def test_the_advice_works(prompts, size, batch, steps):
    command = settings(prompts, size, batch, steps)
    if prompts * size == batch * steps:
        assert global_batch_size(command) == batch
        return
    with pytest.raises(ConfigError) as caught:
        global_batch_size(command)
    for advice in str(caught.value).split("; set ")[1].split(" or "):
        flag, _, value = advice.partition(" ")
        values = {"prompts": prompts, "size": size, "batch": batch, "steps": steps}
        names = {"--global-batch-size": "batch", "--num-steps-per-rollout": "steps", "--rollout-batch-size": "prompts"}
        if value.isdigit():
            global_batch_size(settings(**values | {names[flag]: int(value)}))


def test_data_parallel_ranks_must_divide_the_batch():
    check_settings(settings(batch=256, actor_num_gpus_per_node=4, micro_batch_size=2))
    with pytest.raises(
        ConfigError, match=r"--global-batch-size 256 .* size 4 × --micro-batch-size 3 = 12; set it to 264"
    ):
        check_settings(settings(batch=256, actor_num_gpus_per_node=4, micro_batch_size=3))


def test_taking_turns_is_not_working_at_the_same_time():
    with pytest.raises(ConfigError, match="give --rollout-num-gpus in place of --colocate"):
        check_settings(settings(async_buffer_size=1))


def test_who_gives_memory_back():
    def of(**changes):
        made = settings(**changes)
        check_settings(made)
        return made.kind.trainer_sleeps, made.kind.engines_sleep

    assert of() == (True, True)  # --colocate
    assert of(no_offload_train=None) == (False, True)
    assert of(no_offload_rollout=None) == (True, False)
    assert of(no_offload_train=None, no_offload_rollout=None) == (False, False)
    assert of(debug_rollout_only=None) == (False, False)
    apart = settings(rollout_num_gpus=1)
    for asked in ({}, {"offload_train": True}, {"offload_rollout": True}, {"offload": True}):
        cluster = dataclasses.replace(apart.cluster, colocate=False, **asked)
        own = dataclasses.replace(apart, cluster=cluster)
        check_settings(own)
        wanted = {"offload"} & asked.keys()
        assert own.kind.trainer_sleeps == bool(wanted | {"offload_train"} & asked.keys())
        assert own.kind.engines_sleep == bool(wanted | {"offload_rollout"} & asked.keys())
        if asked:
            lagging = dataclasses.replace(settings(async_buffer_size=1), cluster=cluster)
            with pytest.raises(ConfigError, match=r"take turns, and --async-buffer-size .* leave one of them out"):
                check_settings(lagging)
    with pytest.raises(ConfigError, match="--offload-train and --no-offload-train contradict each other"):
        settings(offload_train=None, no_offload_train=None)
    with pytest.raises(ConfigError, match="--offload and --no-offload-rollout contradict each other"):
        settings(offload=None, no_offload_rollout=None)


NARROW = "--rollout-top-p, --rollout-top-k or --rollout-min-p"


def shape_of(settings):
    return check_shape(settings.rollout, settings.shape)


def quantized(settings, elsewhere=False):
    check_quantized(settings.rollout, settings.engine, elsewhere)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"rollout_top_k": 1}, "--rollout-top-k 1 leaves every token one choice.* or --eval-top-k 1 for evaluation"),
        ({"rollout_top_k": 5000}, "--rollout-top-k 5000 may keep more tokens than an engine lists, 4,096; give "),
        (
            {"rollout_top_p": 0.9, "use_opd": None, "opd_type": "sglang", "rm_url": "http://127.0.0.1:1"},
            f"{NARROW} with --opd-type sglang: .* or give --opd-type megatron",
        ),
    ],
)
def test_what_training_over_kept_tokens_cannot_have(flags, message):
    with pytest.raises(ConfigError, match=message):
        check_settings(settings(**flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"use_routing_replay": None, "use_rollout_logprobs": None},
            "there is none with --use-rollout-logprobs; leave one of them out, or add --use-rollout-routing-replay",
        ),
        ({"use_routing_replay": None, "keep_old_actor": None}, "with --keep-old-actor: several weights choose experts"),
        (
            {"use_rollout_routing_replay": None, "moe_router_fusion": None},
            "--use-rollout-routing-replay does not work with --moe-router-fusion",
        ),
        (
            {"use_rollout_routing_replay": None, "loss_type": "dpo_loss"},
            "replay has no effect, as rows of a data set are trained on as they are with --loss-type dpo_loss",
        ),
    ],
)
def test_what_cannot_have_experts_chosen_again(flags, message):
    with pytest.raises(ConfigError, match=message):
        check_settings(settings(**flags))


def test_routing_replay():
    check_settings(settings(use_routing_replay=None, use_rollout_routing_replay=None, use_rollout_logprobs=None))
    check_settings(settings(use_routing_replay=None))
    with pytest.raises(ConfigError, match="--use-routing-replay does not work with --moe-router-fusion"):
        settings(use_routing_replay=None, moe_router_fusion=None)


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        ({"rollout_min_p": 0.05}, NARROW),
        ({"use_rollout_routing_replay": None}, "--use-rollout-routing-replay"),
        ({"rollout_top_p": 0.9, "debug_rollout_only": None}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("given", ["sglang_config", "prefill_num_servers"])
def test_what_engines_split_in_two_cannot_say(flags, asked, given):
    source = {"sglang_config": "s.yaml"} if given == "sglang_config" else {"prefill_num_servers": 1}
    own = settings(**flags, **source, rollout_num_gpus=2)
    problem = f"{asked} with prefill engines of --{given.replace('_', '-')}: "
    with pytest.raises(ConfigError, match=problem) if asked else contextlib.nullcontext():
        check_whole_engines(own.kind, own.rollout, own.engine)


def test_training_over_kept_tokens():
    check_settings(settings(rollout_top_p=0.9, rollout_top_k=40, rollout_min_p=0.05))
    check_settings(settings(eval_top_k=1, eval_top_p=0.9, eval_prompt_data="held"))


def test_what_an_engine_lists_at_most():
    def listing(most, **flags):
        given = settings(**flags)
        engine = dataclasses.replace(given.engine, sglang_args={"sampling-mask-max-tokens": most})
        return dataclasses.replace(given, engine=engine)

    check_settings(listing("5000", rollout_top_k=5000))
    with pytest.raises(ConfigError, match=f"{NARROW} may keep more .* 2,000; give --sglang.* 4096, or leave it out"):
        check_settings(listing("2000", rollout_top_p=0.9))


def test_a_group_of_one_learns_nothing_and_is_refused():
    with pytest.raises(ConfigError, match=r"--n-samples-per-prompt 1: grpo compares .* give 2 or more"):
        check_settings(settings(size=1))
    assert notices(settings(size=2)) == []
    check_settings(settings(size=1, disable_rewards_normalization=None))
    check_settings(settings(size=1, advantage_estimator="reinforce_plus_plus", normalize_advantages=None))
    check_settings(settings(size=1, custom_advantage_function_path="own.py:advantages"))
    assert len(notices(settings(use_kl_loss=None))) == 1


def test_flags_that_have_no_effect_in_a_run_of_this_kind_are_named():
    assert [line for line in notices(settings(loss_type="sft_loss", size=1)) if "no effect" in line] == [
        "no effect, as nothing is generated: --colocate"
    ]
    more = {"use_tis": None, "tensor_model_parallel_size": 2, "eval_prompt_data": "held"}
    assert [line for line in notices(settings(debug_rollout_only=None, **more)) if "no effect" in line] == [
        "no effect, as nothing is trained: --use-tis",
        "no effect, as there are no trainers: --tensor-model-parallel-size",
        "no effect, as weights stay as they are: --num-steps-per-rollout",
    ]
    assert not any("no effect" in line for line in notices(settings(num_steps_per_rollout=2, size=2)))
    kept = "no effect, as all tokens are of the weights that train on them: --keep-old-actor"
    assert kept in notices(settings(keep_old_actor=None, size=2))
    assert kept not in notices(settings(keep_old_actor=None, update_weights_interval=2, size=2))


def test_weights_that_are_sent_less_often_and_engines_that_are_replaced():
    with pytest.raises(ConfigError, match="--update-weights-interval 3 does not work with --use-fault-tolerance"):
        check_settings(settings(update_weights_interval=3, use_fault_tolerance=None))
    check_settings(settings(update_weights_interval=3))


def test_an_export_needs_a_checkpoint():
    with pytest.raises(ConfigError, match=r"--save-hf .* has no effect without --save; give --save"):
        check_settings(settings(save_hf="hf-{rollout_id}"))
    check_settings(settings(save_hf="hf-{rollout_id}", save="save"))


def test_engines_of_several_gpus():
    command = settings(batch=256, actor_num_gpus_per_node=4, rollout_num_gpus_per_engine=2)
    check_settings(command)
    assert num_engines(command.cluster, command.engine) == 2
    with pytest.raises(ConfigError, match="--rollout-num-gpus 4 must be a multiple of --rollout-num-gpus-per-engine 3"):
        check_settings(settings(batch=256, actor_num_gpus_per_node=4, rollout_num_gpus_per_engine=3))


def test_engines_of_others_need_no_room_here():
    others = ["--rollout-external-engine-addrs", "10.0.0.1:30000", "10.0.0.2:30000"]
    words = ["--hf-checkpoint", "hf", "--prompt-data", "p", "--num-rollout", "1", "--load", "l"]
    words += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2"]
    command = parse_train([*words, *others])
    check_settings(command)
    assert command.engine.external_urls == ("http://10.0.0.1:30000", "http://10.0.0.2:30000")
    assert num_engines(command.cluster, command.engine) == 0
    assert limit_threads(command.engine, engines=0).engine_threads is None
    for ours in (["--colocate"], ["--rollout-num-gpus", "2"]):
        with pytest.raises(ConfigError, match="give one of the two"):
            check_settings(parse_train([*words, *others, *ours]))
    with pytest.raises(ConfigError, match="give --rollout-num-gpus N, or --colocate"):
        check_settings(parse_train(words))


def test_engines_that_may_be_added_are_like_the_others_and_beside_the_trainers():
    def more(*words):
        base = ["--hf-checkpoint", "hf", "--prompt-data", "p", "--num-rollout", "1", "--load", "l"]
        base += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-num-gpus", "2"]
        return parse_train([*base, "--rollout-max-num-gpus", "6", *words])

    healing = "--use-fault-tolerance"
    command = more(healing, "--rollout-num-gpus-per-engine", "2")
    check_settings(command)
    parts = command.cluster, command.engine
    assert (num_engines(*parts), num_spare_engines(*parts)) == (1, 2)
    for words, problem in (
        ([], "--rollout-max-num-gpus 6 has no effect without --use-fault-tolerance; give --use-fault-tolerance"),
        ([healing, "--colocate"], "--colocate has both on the same GPUs"),
        ([healing, "--prefill-num-servers", "1"], "leave --sglang-config and --prefill-num-servers out"),
        ([healing, "--rollout-num-gpus", "6"], "must be --rollout-num-gpus 6 and a multiple of .* 1 more"),
        (
            [healing, "--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "2"],
            "-gpus 6 must be --rollout-num-gpus 3 and a multiple of .* 2 more",
        ),
    ):
        with pytest.raises(ConfigError, match=problem):
            check_settings(more(*words))


def test_eval_interval_needs_held_out_prompts():
    with pytest.raises(
        ConfigError, match="--eval-interval 5 has no effect without --eval-prompt-data or --eval-config; add one"
    ):
        check_settings(settings(batch=256, eval_interval=5))


def test_a_teacher_at_another_temperature_than_the_policy_is_told():
    """A server gives prompt log-probs at temperature 1 alone; the trainer computes a teacher's at the rollouts'."""
    server = {"use_opd": None, "opd_type": "sglang", "rm_url": "http://teacher:30000"}
    [line] = notices(settings(rollout_temperature=0.6, **server))
    assert line.startswith("--rollout-temperature 0.6: ") and "by 0.34 nats a token" in line
    assert notices(settings(**server)) == []
    trainer = {"use_opd": None, "opd_type": "megatron", "opd_teacher_load": "big"}
    assert notices(settings(rollout_temperature=0.6, **trainer)) == []


def test_distillation_needs_a_teacher_and_a_teacher_distillation():
    teacher = {"opd_type": "sglang", "rm_url": "http://teacher:30000"}
    check_settings(settings(use_opd=None, **teacher))
    check_settings(settings(use_opd=None, custom_rm_path="own.py:sets_them"))
    check_settings(settings(use_opd=None, custom_generate_function_path="own.py:sets_them"))
    with pytest.raises(ConfigError, match=r"--use-opd needs the teacher's log-probs: give --opd-type sglang and --rm-"):
        check_settings(settings(use_opd=None))
    with pytest.raises(ConfigError, match="--opd-type sglang have no effect without --use-opd; give --use-opd"):
        check_settings(settings(**teacher))
    in_the_trainer = {"use_opd": None, "opd_type": "megatron", "opd_teacher_load": "big"}
    check_settings(settings(**in_the_trainer))
    for left_out in ("opd_type", "opd_teacher_load"):
        some = {name: value for name, value in in_the_trainer.items() if name != left_out}
        other = {"custom_rm_path": "own.py:sets_them"} if left_out == "opd_type" else {}
        with pytest.raises(ConfigError, match=r"a teacher in the trainer is --opd-type megatron with --opd-teacher-lo"):
            check_settings(settings(**some, **other))


def test_speculative_engines_cut_off_what_they_have_not_looked_at(monkeypatch):
    command = settings(partial_rollout=None, over_sampling_batch_size=64)
    check_settings(command)
    monkeypatch.setitem(command.engine.sglang_args, "speculative-algorithm", "EAGLE")
    with pytest.raises(ConfigError, match="--partial-rollout does not work with --sglang-speculative-algorithm"):
        check_settings(command)


def test_a_token_limit_takes_the_place_of_the_micro_batch_size():
    limit = {"use_dynamic_batch_size": None, "max_tokens_per_gpu": 4096}
    check_settings(settings(batch=256, actor_num_gpus_per_node=4, micro_batch_size=3, **limit))
    with pytest.raises(
        ConfigError, match=r"--global-batch-size 2 .* 4 data-parallel ranks × 1 micro-.* set it to 4 or more"
    ):
        check_settings(settings(prompts=1, size=2, batch=2, actor_num_gpus_per_node=4, **limit))


def test_nccl_takes_no_gpu_twice():
    check_settings(settings(batch=256, update_weight_transport="gloo"))
    with pytest.raises(ConfigError, match="nccl does not work with --colocate"):
        check_settings(settings(batch=256, update_weight_transport="nccl"))


def test_the_shape_of_a_quantized_model_is_that_of_the_same_model_unquantized(tmp_path):
    model = PUBLISHED["deepseek-v3"]
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    assert shape_of(settings(hf=tmp_path)) == model.shape
    quantized = {**model.config, "quantization_config": Fp8Format((128, 128)).to_config([])}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    assert shape_of(settings(hf=tmp_path)) == model.shape


def store(directory, quantization, **tensors):
    (directory / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    save_file(tensors, directory / "model.safetensors")


def test_engines_of_a_quantized_model_need_a_gpu_and_weights_that_can_be_updated(tmp_path, monkeypatch):
    name = "model.layers.0.self_attn.q_proj.weight"
    store(tmp_path, Fp8Format((128, 128)).to_config([]), **{name: torch.ones(8, 8).to(torch.float8_e4m3fn)})
    for directory, dtype in ((tmp_path, "bfloat16"), (tmp_path / "none", "float32")):
        found = settings(hf=directory, fp32=None)
        assert engine_dtype(found.megatron, found.rollout) == dtype
    monkeypatch.setattr(validate, "run_device", lambda: "cuda")
    quantized(settings(hf=tmp_path))
    monkeypatch.setattr(validate, "run_device", lambda: "cpu")
    quantized(settings(hf=tmp_path), elsewhere=True)
    with pytest.raises(ConfigError, match=r"is quantized \(fp8.*\), .* on GPUs alone; .*slime-convert fp8-to-bf16"):
        quantized(settings(hf=tmp_path))
    monkeypatch.setattr(validate, "run_device", lambda: "cuda")
    expert = "model.layers.0.mlp.experts.0.up_proj.weight_packed"
    store(tmp_path, Int4Format(32).to_config([]), **{expert: torch.ones(8, 4, dtype=torch.int32)})
    quantized(settings(hf=tmp_path))
    store(tmp_path, Int4Format(32).to_config([]), **{name + "_packed": torch.ones(8, 4, dtype=torch.int32)})
    with pytest.raises(ConfigError, match=r"q_proj\.weight in INT4, which SGLang can load once but not update"):
        quantized(settings(hf=tmp_path))
    store(tmp_path, {"quant_method": "mxfp4"}, x=torch.ones(1))
    with pytest.raises(ConvertError, match="is stored as mxfp4"):
        quantized(settings(hf=tmp_path))


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("--lora-alpha 8", 1),
        ("--bf16 --fp32", 1),
        ("--lr -1 --lr-decay-style linear --min-lr 0", 1),
        ("--lora-alpha 8 --save-interval 3", 2),
    ],
)
def test_a_problem_is_said_once_and_blames_no_overrides_that_were_not_given(
    words, number, flags, to_words, capsys, tokenizer
):
    given = {name: value for name, value in flags.items() if name != "--save"}
    assert main(["plan", *to_words(given), *words.split()]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("slime-launch: ")]
    assert len(lines) == number and "overrides" not in "".join(lines)


def test_a_format_of_checkpoints_that_is_not_written_is_said_once(flags, to_words, capsys, tokenizer):
    assert main(["plan", *to_words(flags), "--ckpt-format", "torch"]) == 0
    said = "--ckpt-format torch: what is read is detected, and torch_dist is written"
    assert "".join(capsys.readouterr()).count(said) == 1
    for other in ("zarr", "torch_dcp", "fsdp_dtensor"):
        assert main(["plan", *to_words(flags), "--ckpt-format", other]) == 2
        [line] = [line for line in capsys.readouterr().err.splitlines() if "--ckpt-format" in line]
        assert f"invalid choice: '{other}'" in line and "torch_dist is written" in line


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "each step of a rank has 256 micro-batches of --micro-batch-size 1, the default; a CPU reads all weights"),
        ({"prompts": 3, "size": 8}, "24 micro-batches .*: --micro-batch-size 8 makes it 3, if memory allows"),
        ({"prompts": 3, "size": 2}, "6 micro-batches .*: --micro-batch-size 2 makes it 3"),
        ({"actor_num_gpus_per_node": 2}, "has 128 micro-batches"),
        ({"steps": 2}, "has 128 micro-batches"),
        ({"prompts": 1, "size": 3}, None),
        ({"micro_batch_size": 1}, None),
        ({"use_dynamic_batch_size": None, "max_tokens_per_gpu": 4096}, None),
        ({"debug_rollout_only": None}, None),
    ],
)
def test_a_default_micro_batch_that_a_cpu_goes_through_many_of_is_said_with_their_number(more, message):
    found = micro_batch_notes(settings(**more), on_cpu=True)
    if message is None:
        assert found == []
    else:
        [line] = found
        assert re.search(message, line)
    assert micro_batch_notes(settings(**more), on_cpu=False) == []


@pytest.mark.parametrize(
    ("more", "flags"),
    [
        ({}, "--no-offload-train and --no-offload-rollout"),
        ({"no_offload_train": None}, "--no-offload-rollout"),
        ({"no_offload_train": None, "no_offload_rollout": None}, None),
        ({"debug_rollout_only": None}, None),
    ],
)
def test_a_hand_over_on_a_cpu_is_said_with_the_flags_that_switch_it_off(more, flags):
    parts = (made := settings(**more)).kind, made.cluster
    found = hand_over_notes(*parts, on_cpu=True)
    assert [line.partition("time: ")[2] for line in found] == ([f"{flags} if memory suffices"] if flags else [])
    assert hand_over_notes(*parts, on_cpu=False) == []


def test_a_plan_for_a_cpu_says_it_too(workspace, flags, to_words, capsys):
    words = to_words(flags)
    assert main(["plan", *words]) == 0
    assert "8 micro-batches of --micro-batch-size 1, the default" in capsys.readouterr().out
    assert main(["plan", "--device", "h100", *words]) == 0
    assert "the default; a CPU" not in capsys.readouterr().out
