import itertools
import math

import pytest
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slime_convert import ModelShape
from slime_convert.errors import HfConfigError, UnsupportedModelError
from slime_convert.published import PUBLISHED

LLAMA = {key: value for key, value in PUBLISHED["llama3-8B"].config.items() if key != "rope_theta"}
DEEPSEEK = PUBLISHED["deepseek-v3"].config
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 4096}


def test_every_setting_of_llama3_scaling_is_carried():
    settings = {"factor": 2.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0, "original_max_position_embeddings": 128}
    shape = ModelShape.from_hf_config({**LLAMA, "rope_scaling": {"rope_type": "llama3", **settings}})
    carried = (shape.rope_scaling_factor, shape.rope_low_freq_factor, shape.rope_high_freq_factor)
    assert (*carried, shape.rope_original_max_position_embeddings) == tuple(settings.values())


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "su", "mrope", "proportional", "ntk"])
def test_rotary_scaling_of_another_kind_is_refused(key, spelling, kind):
    scaling = {**LLAMA3_SCALING, "rope_theta": 1e4}
    del scaling["rope_type"]
    with pytest.raises(UnsupportedModelError, match=f"rope_type '{kind}'.* allowed: 'default' or 'llama3'"):
        ModelShape.from_hf_config({**LLAMA, key: {**scaling, spelling: kind}})


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
            UnsupportedModelError,
            ["differs between full_attention, sliding_attention", "one for all layers"],
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": LLAMA3_SCALING},
            HfConfigError,
            ["rope_parameters {", "and rope_scaling {", "differ"],
        ),
        (
            {
                "rope_parameters": {**LLAMA3_SCALING, "rope_theta": 1e4},
                "rope_scaling": {**LLAMA3_SCALING, "factor": 8.0},
            },
            HfConfigError,
            ["'factor': 32.0", "'factor': 8.0", "differ"],
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_type": "default", "rope_theta": 1e6}},
            HfConfigError,
            ["10000.0", "1000000.0", "differ"],
        ),
        (
            {"rope_parameters": {"type": "yarn", "rope_type": "default"}},
            HfConfigError,
            ["'yarn'", "'default'", "differ"],
        ),
        (
            {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}},
            HfConfigError,
            ["rope_theta is 1000000.0", "but 10000.0 in its rotary settings"],
        ),
        (
            {"model_type": "glm4", "partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 0.5}},
            HfConfigError,
            ["partial_rotary_factor is 1.0", "but 0.5"],
        ),
        (
            {"original_max_position_embeddings": 4096, "rope_scaling": LLAMA3_SCALING},
            HfConfigError,
            ["original_max_position_embeddings is 4096", "but 8192"],
        ),
        (
            {"rope_scaling": {**LLAMA3_SCALING, "attention_factor": 1.2}},
            UnsupportedModelError,
            ["attention_factor 1.2", "llama3 rope scaling", "allowed: factor, low_freq_factor"],
        ),
    ],
)
def test_rotary_settings_that_cannot_be_carried(change, error, words):
    with pytest.raises(error) as caught:
        ModelShape.from_hf_config({**LLAMA, **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_same_rotary_settings_in_both_places_are_read_once():
    both = {"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 5e5}, "rope_scaling": LLAMA3_SCALING, "rope_theta": 5e5}
    old = {"rope_scaling": {**LLAMA3_SCALING, "type": "llama3"}, "rope_theta": 5e5}
    assert ModelShape.from_hf_config({**LLAMA, **both}) == ModelShape.from_hf_config({**LLAMA, **old})


def test_every_setting_of_yarn_is_carried():
    changed = {"factor": 8, "beta_fast": 16, "beta_slow": 2, "original_max_position_embeddings": 512}
    shape = ModelShape.from_hf_config({**DEEPSEEK, "rope_scaling": {**DEEPSEEK["rope_scaling"], **changed}})
    values = dict(itertools.pairwise(shape.to_megatron_flags()))
    flags = ("--rotary-scaling-factor", "--beta-fast", "--beta-slow", "--original-max-position-embeddings")
    assert [values[flag] for flag in flags] == ["8", "16", "2", "512"]


@pytest.mark.parametrize(
    ("given", "carried"),
    [
        ({}, (1.0, 0.0)),
        ({"mscale": 1.0}, (1.0, 0.0)),
        ({"mscale": 1.0, "mscale_all_dim": 0}, (1.0, 0.0)),
        ({"mscale": 0.7, "mscale_all_dim": 0.5}, (0.7, 0.5)),
        ({"mscale": 0.7}, None),
        ({"mscale": 0, "mscale_all_dim": 0}, None),
        ({"mscale": 0, "mscale_all_dim": 1.0}, None),
        ({"mscale_all_dim": 1.0}, None),
    ],
)
def test_coefficients_of_yarns_factors(given, carried):
    """Carried where megatron-core's two factors are transformers', refused elsewhere."""
    config = {**DEEPSEEK, "rope_scaling": {**YARN, **given}}
    if carried is None:
        with pytest.raises(UnsupportedModelError, match=r"mscale .* with mscale_all_dim .* is not supported"):
            ModelShape.from_hf_config(config)
        return
    shape = ModelShape.from_hf_config(config)
    assert (shape.mscale, shape.mscale_all_dim) == carried
    theirs = DeepseekV3Config(**{key: value for key, value in config.items() if key != "model_type"})
    _, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs)

    def growth(coefficient):  # YaRN (Peng et al., 2023), section 3.4
        return 0.1 * coefficient * math.log(shape.rotary_scaling_factor) + 1

    assert factor == pytest.approx(growth(shape.mscale) / growth(shape.mscale_all_dim))


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("attention_factor", r"attention_factor False in the yarn rope scaling .* allowed: factor, "),
        ("extrapolation_factor", r"extrapolation_factor False in the yarn rope scaling .* allowed: factor, "),
        ("truncate", r"truncate false in the yarn rope scaling .* allowed: true, which Megatron always does"),
    ],
)
def test_further_settings_of_yarn_are_refused(key, told):
    with pytest.raises(UnsupportedModelError, match=told):
        ModelShape.from_hf_config({**DEEPSEEK, "rope_scaling": {**YARN, key: False}})


def test_what_is_so_in_yarn_anyway_is_accepted():
    plain = ModelShape.from_hf_config({**DEEPSEEK, "rope_scaling": YARN})
    assert ModelShape.from_hf_config({**DEEPSEEK, "rope_scaling": {**YARN, "truncate": True}}) == plain
