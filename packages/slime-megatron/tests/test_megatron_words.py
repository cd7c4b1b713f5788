"""Megatron's arguments as its source and our tables have them. The source is core's own, imported by a rank."""

import dataclasses
import subprocess
import sys
import typing

import pytest

from slime_core.errors import ConfigError
from slime_megatron import core_fields as reader
from slime_megatron.arguments import classes
from slime_megatron.config import MegatronConfig
from slime_megatron.core_check import argument_notices, check_megatron_args
from slime_megatron.core_fields import UNKNOWN, core_fields
from slime_megatron.fits import misfits, stage_layers
from slime_megatron.megatron_words import answer, field_words, megatron_args, said

NEEDS_NO_TORCH = """
import sys
from slime_megatron.megatron_words import field_words
from slime_megatron.core_check import check_megatron_args
assert len(field_words()) > 250
assert "torch" not in sys.modules and "megatron" not in sys.modules
"""


def test_the_words_are_read_without_torch():
    subprocess.run([sys.executable, "-c", NEEDS_NO_TORCH], check=True, timeout=240)


def test_every_field_of_the_installed_core_is_in_one_class():
    """A field of a newer core is in none: say in `arguments.py` what becomes of it."""
    found = {name: classes(name) for name in core_fields()}
    assert {name: kinds for name, kinds in found.items() if len(kinds) != 1} == {}


def test_the_fields_are_those_of_cores_dataclasses(ranks, tiny_model, tiny_config):
    ranks.start(1, tiny_config(), tiny_model("qwen3").shape)
    wanted = ranks.first("core_dataclasses")
    read = core_fields()
    assert read.keys() == wanted.keys()
    plain = {name: default for name, default in wanted.items() if default != "?"}
    assert len(plain) > 250
    assert {name: read[name].default for name in plain} == plain
    assert all(read[name].default is UNKNOWN for name in wanted.keys() - plain.keys())


def test_annotations_become_types():
    fields = core_fields()
    assert fields["bucket_size"].hint == int | None
    assert fields["moe_aux_loss_coeff"].hint == float | list[float]
    assert fields["window_size"].hint == tuple[int, int] | None
    assert fields["moe_token_drop_policy"].hint == typing.Literal["probs", "position"]
    assert fields["init_method"].is_function
    assert fields["add_bias_linear"].words == ("--disable-bias-linear",)
    assert fields["lr"].owners == {"OptimizerConfig"}


@pytest.mark.parametrize(
    ("given", "args"),
    [
        ({"decoder_last_pipeline_num_layers": 3}, {"num_layers_in_last_pipeline_stage": 3}),
        ({"no_rope_fusion": True}, {"apply_rope_fusion": False}),
        ({"no_check_for_nan_in_loss_and_grad": True}, {"check_for_nan_in_grad": False}),
        ({"use_gated_attention": True}, {"attention_output_gate": True}),
        ({"moe_aux_loss_coeff": (0.5,)}, {"moe_aux_loss_coeff": 0.5}),
        ({"moe_aux_loss_coeff": (0.5, 0.1)}, {"moe_aux_loss_coeff": [0.5, 0.1]}),
        ({"moe_router_load_balancing_type": ("none",)}, {"moe_router_load_balancing_type": "none"}),
        ({"ddp_bucket_size": 7, "lr": 1.0}, {"bucket_size": 7}),
        ({"no_clone_scatter_output_in_embedding": True}, {"clone_scatter_output_in_embedding": False}),
    ],
)
def test_words_become_arguments(given, args):
    assert megatron_args(given) == args
    assert all(said(name, value).startswith("--") for name, value in args.items())


def test_what_megatron_does_not_spell_so_is_no_word():
    words = field_words()
    for name in ("--apply-rope-fusion", "--num-moe-experts", "--bucket-size", "--init-method", "--bias-dropout-fusion"):
        assert name not in words
    assert words["--moe-token-dispatcher-type"].spec.choices == ("allgather", "alltoall", "flex")
    assert words["--fp8-format"].is_refused
    assert not words["--moe-grouped-gemm"].is_refused


@pytest.mark.parametrize(
    ("word", "values", "no_effect", "reason"),
    [
        ("--seq-length", ["4096"], True, "rows are packed"),
        ("--no-position-embedding", [], True, "rotary"),
        ("--spec", ["slime_plugins.models.glm4", "get_glm_spec"], True, "the model's config"),
        ("--spec", ["my_models.tower", "spec"], False, "only slime_plugins.models"),
        ("--train-iters", ["10"], False, "give --num-rollout"),
        ("--make-vocab-size-divisible-by", ["16"], True, "padding rows"),
        ("--use-checkpoint-opt_param-scheduler", [], True, "the flags that it began with"),
        ("--tokenizer-model", ["x"], False, "give --hf-checkpoint"),
        ("--mask-type", ["random"], False, "only decoders are trained"),
    ],
)
def test_words_that_are_no_field_are_answered(word, values, no_effect, reason):
    found = answer(word, values)
    assert found.has_no_effect is no_effect
    assert reason in found.reason


def test_words_of_nobody_are_not_answered():
    assert answer("--moe-grouped-gem", []) is None
    assert answer("--my-own-flag", ["1"]) is None
    assert answer("--mask_truncated_completions", []) is None  # TRL's


def test_megatrons_own_command_line_is_read_where_it_is(tmp_path, monkeypatch):
    """With words whose fields the installed core has under another name, and with one that nobody knows."""
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    (tmp_path / "megatron" / "training" / "arguments.py").write_text(
        "import torch_that_is_not_there\n"
        "def add(group):\n"
        "    group.add_argument('--spread-weights', type=int, dest='moe_expert_capacity_factor')\n"
        "    group.add_argument('--no-gather-early', action='store_false', dest='align_param_gather')\n"
        "    group.add_argument('--frobnicate', action='store_true')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for cached in (reader.training_words, field_words):
        cached.cache_clear()
    try:
        assert field_words()["--no-gather-early"].value is False
        assert field_words()["--spread-weights"].field == "moe_expert_capacity_factor"
        assert "does not know what it would change" in answer("--frobnicate", []).reason
    finally:
        monkeypatch.undo()
        for cached in (reader.training_words, field_words):
            cached.cache_clear()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"fp8": "hybrid"}, "--fp8-format hybrid cannot be given: it is a setting of Transformer Engine's layers"),
        ({"overlap_p2p_comm": False, "fp16": True}, "--fp16 cannot be given: precision follows --bf16; leave it out"),
        ({"num_moe_experts": 4}, "--num-experts 4: the model has None"),
        ({"optimizer_offload_fraction": 1.5}, "--optimizer-offload-fraction 1.5 must be above 0, and at most 1; "),
        ({"optimizer_offload_fraction": "half"}, "--optimizer-offload-fraction 'half' must be float"),
        ({"moe_aux_loss_coeff": 0.1}, "moe_aux_loss_coeff 0.1: the model has no experts; leave it out"),
        ({"bucket_size": "large"}, "--ddp-bucket-size 'large' must be int or None"),
    ],
)
def test_the_tables_refuse_before_anything_starts(tiny_model, args, words):
    with pytest.raises(ConfigError) as caught:
        check_megatron_args(MegatronConfig(megatron_args=args), tiny_model("qwen3").shape, on_gpu=False)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_core_refuses_before_anything_starts(tiny_model):
    args = {"moe_pad_expert_input_to_capacity": True}
    shape = tiny_model("qwen3-moe").shape
    with pytest.raises(ConfigError, match="Megatron-core refuses the settings, given moe_pad_expert_in") as caught:
        check_megatron_args(MegatronConfig(megatron_args=args), shape, on_gpu=False)
    assert "\n" not in str(caught.value)


def test_what_has_no_effect_is_said_as_it_was_typed(tiny_model):
    args = {"pin_cpu_grads": False, "moe_token_dispatcher_type": "flex", "moe_grouped_gemm": False}
    config = MegatronConfig(megatron_args=args)
    assert argument_notices(config, tiny_model("qwen3-moe").shape, on_gpu=False) == [
        "--no-pin-cpu-grads has no effect (it is for --optimizer-cpu-offload on a GPU)",
        "--moe-token-dispatcher-type flex has no effect (alltoall dispatches tokens)",
    ]


def test_an_optimizer_in_host_memory_is_for_a_gpu(tiny_model):
    """Where it needs what is the default there; on a CPU upstream's flags change nothing, and that is said."""
    names = ("optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer")
    args, shape = dict.fromkeys(names, True), tiny_model("qwen3").shape
    config = MegatronConfig(megatron_args=args)
    check_megatron_args(config, shape, on_gpu=False)
    assert argument_notices(config, shape, on_gpu=False) == [
        "--optimizer-cpu-offload has no effect (on a CPU the optimizer's state is in host memory already)",
        "--overlap-cpu-optimizer-d2h-h2d has no effect (it is for --optimizer-cpu-offload on a GPU)",
        "--use-precision-aware-optimizer has no effect (the optimizer's state is fp32)",
    ]
    with pytest.raises(ConfigError, match="--optimizer-cpu-offload needs --bf16 and --use-distributed-optimizer, also"):
        check_megatron_args(config, shape, on_gpu=True)
    on_gpu = MegatronConfig(megatron_args=args, bf16=True, use_distributed_optimizer=True)
    check_megatron_args(on_gpu, shape, on_gpu=True)
    assert argument_notices(on_gpu, shape, on_gpu=True) == []


@pytest.mark.parametrize(
    ("ends", "ranks", "virtual", "stages"),
    [
        ((None, 3), 2, None, [1, 3]),
        ((1, None), 2, None, [1, 3]),
        ((1, 1), 4, None, [1, 1, 1, 1]),
        ((2, None), 4, None, None),
        ((1, 2), 2, None, None),
        ((None, 2), 2, 2, [2, 2]),
        ((None, 3), 2, 2, None),
        ((None, 1), 1, None, None),
        ((None, 4), 2, None, None),
        ((2, 2), 2, 2, None),
    ],
)
def test_uneven_stages(tiny_model, ends, ranks, virtual, stages):
    names = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    config = MegatronConfig(
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=virtual,
        megatron_args={name: value for name, value in zip(names, ends, strict=True) if value is not None},
    )
    shape = dataclasses.replace(tiny_model("qwen3").shape, num_layers=4)
    found = list(misfits(config, shape))
    if stages is None:
        assert len(found) == 1
        assert "pipeline-num-layers" in found[0]
    else:
        assert found == []
        assert stage_layers(config, 4) == stages
