"""The settings reject what cannot work, and can be read without torch."""

import subprocess
import sys

import pytest

from slime_convert.shape import ModelShape
from slime_core.errors import ConfigError
from slime_core.flags import flag_specs
from slime_megatron.config import MegatronConfig


def test_flags_carry_megatron_names_and_defaults():
    specs = {spec.name: spec for spec in flag_specs(MegatronConfig)}
    assert specs["--tensor-model-parallel-size"].default == 1
    assert specs["--share-prompts"].is_switch
    assert specs["--clip-grad"].default == 1.0
    assert specs["--seed"].default == 1234
    assert all(spec.help for spec in specs.values())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"pipeline_model_parallel_size": 2}, "--tensor-model-parallel-size"),
        ({"sequence_parallel": True}, "--sequence-parallel needs"),
        ({"micro_batch_size": 0}, "--micro-batch-size 0"),
        ({"lr": -1.0}, "--lr -1.0"),
        ({"lr_decay_style": "step"}, "constant, linear, cosine"),
        ({"lr_decay_style": "cosine"}, "--lr-decay-iters"),
        ({"lr_decay_style": "linear", "lr_decay_iters": 5, "lr_warmup_iters": 5}, "less than --lr-decay-iters 5"),
        ({"min_lr": 1.0}, "above --lr"),
        ({"save_interval": 1}, "needs --save"),
        ({"adam_beta2": 1.0}, "--adam-beta2 1.0"),
        ({"recompute_granularity": "full"}, "go together"),
        ({"recompute_num_layers": 1}, "go together"),
    ],
)
def test_impossible_settings_are_named(values, words):
    with pytest.raises(ConfigError, match=words):
        MegatronConfig(**values)


def test_data_parallel_size():
    assert MegatronConfig(tensor_model_parallel_size=2).data_parallel_size(4) == 2
    with pytest.raises(ConfigError, match="3 trainer ranks"):
        MegatronConfig(tensor_model_parallel_size=2).data_parallel_size(3)


def test_a_model_that_does_not_divide_is_named():
    shape = ModelShape(
        family="llama",
        num_layers=1,
        hidden_size=12,
        ffn_hidden_size=12,
        num_attention_heads=6,
        num_query_groups=3,
        kv_channels=2,
        vocab_size=10,
        max_position_embeddings=8,
    )
    MegatronConfig(tensor_model_parallel_size=3).check_fits(shape)
    with pytest.raises(ConfigError, match="num_query_groups 3; allowed: 1, 3"):
        MegatronConfig(tensor_model_parallel_size=2).check_fits(shape)


def test_the_flag_table_needs_no_torch():
    code = "import sys, slime_megatron.config; sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
