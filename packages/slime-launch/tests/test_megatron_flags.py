"""Megatron's own arguments on the command line: each has one answer, before anything is read or started."""

import subprocess
import sys

import pytest

from slime_core.errors import SlimeError
from slime_launch.config import Settings
from slime_launch.errors import FlagError
from slime_launch.flags import parse_train, read_train
from slime_launch.megatron_flags import argument_notes
from slime_launch.preflight import preflight
from slime_launch.resume import changed_flags
from slime_launch.validate import check_shape


@pytest.fixture
def words(flags, to_words):
    return to_words(flags)


def test_arguments_reach_the_trainer_by_the_names_of_cores_fields(words):
    given = ["--decoder-last-pipeline-num-layers", "3", "--moe-z-loss-coeff", "0.001", "--no-rope-fusion"]
    settings = parse_train([*words, *given, "--moe-router-load-balancing-type", "none"])
    args = {
        "num_layers_in_last_pipeline_stage": 3,
        "moe_z_loss_coeff": 0.001,
        "apply_rope_fusion": False,
        "moe_router_load_balancing_type": "none",
    }
    assert dict(settings.megatron.megatron_args) == args
    assert settings.flags().items() >= args.items()


def test_arguments_outlive_a_change_of_the_settings(words):
    settings = parse_train([*words, "--ddp-bucket-size", "7"])
    assert settings.megatron.changed(lr=0.5).megatron_args == {"bucket_size": 7}


def test_words_that_are_no_field_are_noted_or_refused_with_the_other_problems(words):
    settings, found = read_train([*words, "--seq-length", "4096", "--spec", "slime_plugins.models.glm4", "get_spec"])
    assert isinstance(settings, Settings)
    assert found == []
    assert settings.notes == (
        "no effect here: --seq-length (rows are packed, and as long as their samples), "
        "--spec (the layers follow from the model's config)",
    )
    with pytest.raises(FlagError) as caught:
        parse_train([*words, "--fsdp-2-many", "--data-path", "x", "--train-iters=3", "--lr", "x"])
    assert str(caught.value).splitlines()[1:] == [
        "--data-path cannot be given: give --prompt-data",
        "--train-iters cannot be given: give --num-rollout",
        "--lr: 'x' is not a number",
    ]


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--moe-z-loss-coef", "--moe-z-loss-coeff"),
        ("--moe-enable-depep", "--moe-enable-deepep"),
        ("--decoder-last-pipeline-layers", "--decoder-last-pipeline-num-layers"),
        ("--lr-decay-itrs", "--lr-decay-iters"),
        ("--weight-decy", "--weight-decay"),
    ],
)
def test_hints_know_them(words, word, hint):
    with pytest.raises(FlagError, match=f"unknown flag {word}; did you mean {hint}"):
        parse_train([*words, word, "1"])


def test_hints_name_nothing_that_is_refused(words):
    with pytest.raises(FlagError) as caught:
        parse_train([*words, "--fp8-formt", "hybrid"])
    assert "--fp8-format" not in str(caught.value)


def test_they_are_refused_with_what_else_is_wrong(words):
    argv = [*words, "--fp8-format", "hybrid"]
    settings, found = read_train([*argv, "--moe-aux-loss-coeff", "0.1", "--eval-interval", "1"])
    with pytest.raises(SlimeError) as caught:
        preflight(settings, found)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    for text in (
        "--fp8-format hybrid cannot be given: it is a setting of Transformer Engine's layers",
        "the model has no experts",
        "--eval-interval 1 has no effect without --eval-prompt-data or --eval-config",
    ):
        assert any(text in line for line in lines), (text, lines)


def test_upstreams_flags_of_an_offloaded_optimizer_run_on_a_cpu(words):
    """They are said to have no effect there, and may be left out, or given, when the run goes on."""
    upstream = ["--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d", "--use-precision-aware-optimizer"]
    settings = parse_train([*words, *upstream])
    found = preflight(settings)
    [note] = argument_notes(settings.megatron, found.shape)
    assert all(f"{word} has no effect (" in note for word in upstream)
    assert changed_flags(settings.flags(), parse_train(words).flags()) == []


def test_what_has_no_effect_is_said_in_one_line(words):
    settings = parse_train([*words, "--use-precision-aware-optimizer", "--moe-enable-deepep"])
    assert argument_notes(settings.megatron, check_shape(settings.rollout, settings.shape)) == [
        "Megatron's arguments: --use-precision-aware-optimizer has no effect (the optimizer's state is fp32); "
        "--moe-enable-deepep has no effect (the model has no experts)"
    ]
    assert argument_notes(parse_train(words).megatron, check_shape(settings.rollout, settings.shape)) == []


def test_a_run_goes_on_with_the_same_arguments_but_for_those_without_effect():
    old = {"lr": 1.0, "moe_z_loss_coeff": 0.1}
    assert changed_flags(old, old | {"moe_enable_deepep": True}) == []
    assert changed_flags(old, {"lr": 1.0}) == ["--moe-z-loss-coeff 0.1 → None"]


def test_the_help_lists_them():
    command = [sys.executable, "-m", "slime_launch.cli", "train", "--help-megatron"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout.splitlines()
    by_word = {line.split()[0]: line for line in lines}
    assert by_word["--moe-z-loss-coeff"].endswith("[given to Megatron-core]")
    assert by_word["--moe-grouped-gemm"].endswith("[given to Megatron-core]")
    assert "[refused: it is a setting of Transformer Engine's layers" in by_word["--fp8-format"]
    assert by_word["--seq-length"].endswith("[no effect: rows are packed, and as long as their samples]")
    assert "--lr" not in by_word
