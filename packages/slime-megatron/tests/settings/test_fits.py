"""Which models can be trained, and over which ranks they divide."""

import dataclasses

import pytest

from slime_convert.published import PUBLISHED
from slime_convert.shape import ModelShape
from slime_core.errors import ConfigError
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.settings.fits import check_fits, misfits, stage_layers

TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def shape(family="llama", **values):
    sizes = {
        "num_layers": 6,
        "hidden_size": 12,
        "ffn_hidden_size": 12,
        "num_attention_heads": 6,
        "num_query_groups": 3,
        "kv_channels": 2,
        "vocab_size": 10,
        "max_position_embeddings": 8,
    }
    return ModelShape(family=family, **sizes | values)


EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 6, "moe_router_topk": 2}


@pytest.mark.parametrize(
    ("values", "experts", "words"),
    [
        ({"tensor_model_parallel_size": 2}, {}, "size 2 does not divide the model's num_query_groups 3; allowed: 1, 3"),
        ({"pipeline_model_parallel_size": 4}, {}, "size 4 does not divide the model's num_layers 6; allowed: 1, 2, 3"),
        (
            {"pipeline_model_parallel_size": 7},
            {},
            "size 7 does not divide the model's num_layers 6; allowed: 1, 2, 3, 6",
        ),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            {},
            "pipeline-model-parallel-size 2 × --virtual-pipeline-model-parallel-size 2 does not divide the model's "
            "num_layers 6; allowed in all: 1, 2, 3, 6",
        ),
        ({"expert_model_parallel_size": 2}, {}, "--expert-model-parallel-size 2: the model has no experts"),
        ({"expert_model_parallel_size": 3}, EXPERTS, "size 3 does not divide the model's num_experts 4; allowed: 1, 2"),
        (
            {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 4},
            EXPERTS,
            "--expert-tensor-parallel-size 4 does not divide the model's moe_ffn_hidden_size 6; allowed: 1, 2, 3, 6",
        ),
        (
            TP2_SP | {"expert_tensor_parallel_size": 1},
            EXPERTS | {"num_query_groups": 2},
            "--expert-tensor-parallel-size 1 differs from --tensor-model-parallel-size 2, which needs --expert-model",
        ),
        (
            {"tensor_model_parallel_size": 3},
            EXPERTS,
            "--tensor-model-parallel-size 3 of a model with experts needs --sequence-parallel; add it",
        ),
        (
            {"tensor_model_parallel_size": 3},
            {"multi_latent_attention": True},
            "--tensor-model-parallel-size 3 of a model with latent attention needs --sequence-parallel; add it",
        ),
        (
            {"recompute_activations": True, "recompute_modules": ("mlp", "moe")},
            {},
            "--recompute-modules moe: the model has no experts; leave it out",
        ),
        (
            {"recompute_activations": True, "recompute_modules": ("shared_experts",)},
            EXPERTS,
            "--recompute-modules shared_experts: the model has no shared experts; leave it out",
        ),
    ],
)
def test_a_model_that_does_not_divide_is_named(values, experts, words):
    with pytest.raises(ConfigError, match=words):
        check_fits(MegatronConfig(**values), shape("qwen3_moe" if "num_experts" in experts else "llama", **experts))


def test_what_divides_fits():
    check_fits(MegatronConfig(tensor_model_parallel_size=3, pipeline_model_parallel_size=6), shape())
    config = MegatronConfig(**TP2_SP, expert_model_parallel_size=4, expert_tensor_parallel_size=1)
    check_fits(config, shape("qwen3_moe", num_query_groups=2, **EXPERTS))
    # A size of experts' ranks means nothing to a model without experts.
    check_fits(MegatronConfig(**TP2_SP, expert_tensor_parallel_size=1), shape(num_query_groups=2))


def test_a_model_with_parts_that_the_trainer_lacks_is_refused():
    other = {"swiglu": False, "gelu_tanh": True, "window_size": 4, "layernorm_zero_centered_gamma": True}
    others = "swiglu False, gelu_tanh True, layernorm_zero_centered_gamma True, window_size 4"
    with pytest.raises(ConfigError, match=f"family gemma3_text and has {others}, which cannot be trained yet"):
        check_fits(MegatronConfig(), shape("gemma3_text", **other))


TRAINED = "llama qwen2 qwen3 glm glm4 qwen3_moe glm4_moe glm4_moe_lite deepseek_v3 kimi_k2"


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_models_can_be_trained_or_are_refused_by_name(name):
    published = PUBLISHED[name].shape
    if published.family in TRAINED.split():
        check_fits(MegatronConfig(), published)
    else:
        with pytest.raises(ConfigError, match=f"family {published.family} and has "):
            check_fits(MegatronConfig(), published)


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
