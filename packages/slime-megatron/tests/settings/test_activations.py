"""What a micro-batch takes follows the published formula, and what parallelism and recomputation do to it."""

import pytest

from slime_convert.published import PUBLISHED
from slime_megatron.settings.activations import activation_memory
from slime_megatron.settings.config import MegatronConfig

TOKENS = 4096
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def memory(model="llama3-8B", tokens=TOKENS, stage=0, micro_batches=1, **flags):
    config = MegatronConfig(bf16=True, **flags)
    shape = PUBLISHED[model].shape
    return activation_memory(shape, config, stage=stage, tokens=tokens, micro_batches=micro_batches, fused=True)


def test_a_layer_keeps_what_the_paper_counts():
    """Korthikanti et al., table 2, without scores and dropout: 8 of the norms' and residual bytes, queries to output,
    and the MLP's; here with grouped keys and a gated MLP."""
    shape = PUBLISHED["llama3-8B"].shape
    size, group = shape.hidden_size, shape.num_query_groups * shape.kv_channels
    per_token = 2 * 4 * size + 2 * (3 * size + 3 * group) + 2 * 3 * shape.ffn_hidden_size
    assert memory().layers == shape.num_layers * TOKENS * per_token


def test_full_recomputation_keeps_the_inputs_and_one_layer():
    shape = PUBLISHED["llama3-8B"].shape
    inputs = shape.num_layers * TOKENS * 2 * shape.hidden_size
    kept = memory(**FULL)
    assert kept.layers == inputs + memory().layers // shape.num_layers
    assert kept.working == memory().working


@pytest.mark.parametrize("model", ["qwen3-4B", "glm4-9B"])
def test_ranks_share_layers_and_tokens(model):
    tensor = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    assert memory(model, **tensor).layers == pytest.approx(memory(model).layers / 2, rel=1e-3)
    assert memory(model, context_parallel_size=2).layers == memory(model, tokens=TOKENS // 2).layers


def test_the_first_stage_has_as_many_micro_batches_in_flight_as_there_are_stages():
    one, first, last = (
        memory(**flags)
        for flags in (
            {},
            {"pipeline_model_parallel_size": 4, "micro_batches": 8},
            {"pipeline_model_parallel_size": 4, "micro_batches": 8, "stage": 3},
        )
    )
    assert first.layers == one.layers
    assert last.layers == one.layers // 4
    assert first.logits == 0 < last.logits


def test_selective_recomputation_leaves_the_mlp_out():
    kept = memory(recompute_granularity="selective", recompute_modules=("mlp",))
    assert kept.layers < 0.65 * memory().layers
    assert memory(recompute_granularity="selective").layers == memory().layers
