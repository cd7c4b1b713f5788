"""Which kernels compute a model."""

import pytest

from slime_core.errors import ConfigError
from slime_megatron.settings.config import MegatronConfig

TE = {"transformer_impl": "transformer_engine"}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "moe_act", "core_attn")}
LORA = {"lora_rank": 4, "lora_alpha": 8.0}
GPU, OLD_GPU, NO_TE = (True, True, True), (True, True, False), (True, False, True)


@pytest.mark.parametrize(
    ("found", "settings", "expected", "shares"),
    [
        ((), {"bf16": True}, (False, False, False), True),
        (GPU, {"bf16": True}, (True, True, True), True),
        (OLD_GPU, {"bf16": True}, (True, True, False), False),
        (NO_TE, {"bf16": True}, (False, False, True), True),
        (GPU, {}, (False, False, False), True),
        (GPU, TE, (True, False, False), True),
        (GPU, {"bf16": True, "transformer_impl": "local"}, (False, False, True), True),
        (GPU, {"bf16": True, **LORA}, (False, False, True), True),
        (GPU, {"bf16": True, "context_parallel_size": 2}, (True, False, True), True),
        (GPU, {"bf16": True, **TE}, (True, True, True), True),
        (GPU, {"bf16": True, **RECOMPUTED}, (True, True, True), True),
    ],
)
def test_which_kernels_are_chosen(ranks, found, settings, expected, shares):
    chosen = ranks.call_apart(1, "chosen_kernels", MegatronConfig(**settings), found)
    assert chosen == [(*expected, shares)]


@pytest.mark.parametrize(
    ("found", "settings", "message"),
    [
        ((), TE, "--transformer-impl transformer_engine: there is no GPU for its layers; give auto or local"),
        (NO_TE, TE, "Transformer Engine is not installed"),
        (OLD_GPU, {"bf16": True, "share_prompts": "on"}, "--share-prompts on needs PyTorch's flash attention"),
        (
            (),
            {"bf16": True, **RECOMPUTED},
            r"--recompute-modules layernorm moe_act works with .* \(there is no GPU\)",
        ),
        (NO_TE, {"bf16": True, **RECOMPUTED}, r"\(Transformer Engine is not installed\); allowed: core_attn, mlp"),
        (
            GPU,
            RECOMPUTED,
            r"local ones are built here \(without --bf16\); allowed: core_attn, mlp, moe",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(ranks, rank_error, found, settings, message):
    with pytest.raises(rank_error, match=message) as caught:
        ranks.call_apart(1, "chosen_kernels", MegatronConfig(**settings), found)
    assert caught.value.kind == "ConfigError" and "\n" not in caught.value.text


def test_adapters_need_local_layers():
    with pytest.raises(ConfigError, match="--lora-rank puts adapters on Megatron-core's own layers"):
        MegatronConfig(**LORA, **TE)
