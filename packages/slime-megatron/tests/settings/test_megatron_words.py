"""Megatron's arguments as its source and our tables have them. The source is core's own, imported by a rank."""

import subprocess
import sys

import pytest

from slime_megatron.settings import megatron_fields as reader
from slime_megatron.settings.arguments import classes
from slime_megatron.settings.megatron_fields import megatron_fields
from slime_megatron.settings.megatron_words import field_words, megatron_args, said, word_answer

NEEDS_NO_TORCH = """
import sys
from slime_megatron.settings.megatron_words import field_words
from slime_megatron.settings.megatron_check import check_megatron_args
assert len(field_words()) > 250
assert "torch" not in sys.modules and "megatron" not in sys.modules
"""


def test_the_words_are_read_without_torch():
    subprocess.run([sys.executable, "-c", NEEDS_NO_TORCH], check=True, timeout=240)


def test_every_field_of_the_installed_core_is_in_one_class():
    """A field of a newer core is in none: say in `arguments.py` what becomes of it."""
    found = {name: classes(name) for name in megatron_fields()}
    assert {name: kinds for name, kinds in found.items() if len(kinds) != 1} == {}


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
    found = word_answer(word, values)
    assert found.has_no_effect is no_effect
    assert reason in found.reason


def test_words_of_nobody_are_not_answered():
    assert word_answer("--moe-grouped-gem", []) is None
    assert word_answer("--my-own-flag", ["1"]) is None
    assert word_answer("--mask_truncated_completions", []) is None  # TRL's


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
        assert "does not know what it would change" in word_answer("--frobnicate", []).reason
    finally:
        monkeypatch.undo()
        for cached in (reader.training_words, field_words):
            cached.cache_clear()
