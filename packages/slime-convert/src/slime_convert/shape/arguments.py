"""The arguments that a Megatron checkpoint records, held against those of a model's shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_convert.errors import ShapeMismatchError
from slime_convert.families import FAMILIES


def check_args(
    expected: Mapping[str, Any], args: Mapping[str, Any], where: Path, *, same_vocabulary: bool = False
) -> None:
    """Refuse a checkpoint whose recorded arguments contradict a model's, with all contradictions in one message.

    Arguments that are not recorded pass. The model's are those of :meth:`slime_convert.ModelShape.to_megatron_args`.
    ``same_vocabulary`` is for arguments whose vocabulary is the model's too, without Megatron's padding.
    """
    # Megatron pads or shortens these two at will.
    loose = {"max_position_embeddings"} | (set() if same_vocabulary else {"vocab_size"})
    # Kimi-K2's makers advise calling it deepseek_v3 where kimi_k2 is not known: its weights are the same.
    family, recorded = (FAMILIES.get(str(side.get("hf_model_type"))) for side in (expected, args))
    if family and recorded and family.layer is recorded.layer:
        loose.add("hf_model_type")
    # Megatron does not read these, or they change nothing.
    if not expected["use_rope_scaling"]:
        loose.add("rope_scaling_factor")
    if expected.get("multi_latent_attention"):
        loose |= {"kv_channels", "num_query_groups", "group_query_attention"}
    if expected.get("rope_type") != "yarn":
        loose |= {"rope_type", "rotary_scaling_factor", "original_max_position_embeddings"}
        loose |= {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    if expected.get("moe_router_score_function") == "sigmoid":
        loose.add("moe_router_pre_softmax")
    if expected.get("moe_layer_freq") == 1:
        loose.add("moe_layer_freq")
    if not expected["group_query_attention"]:
        loose |= {"group_query_attention", "num_query_groups"}
    if args.get("mtp_num_layers") == 0:  # the modules' weights are missed, or copied, by name
        loose.add("mtp_num_layers")
    wrong = [
        f"{name} {str(args[name])[:200]} (config: {value})"
        for name, value in expected.items()
        if name not in loose and args.get(name) is not None and not _same(args[name], value)
    ]
    _refuse_other_meaning(expected, args, where)
    if wrong:
        raise ShapeMismatchError(
            f"{where} was written by another model than the given Hugging Face config describes: {'; '.join(wrong)}; "
            "give the Hugging Face directory that training began with"
        )


def _refuse_other_meaning(expected: Mapping[str, Any], args: Mapping[str, Any], where: Path) -> None:
    """Refuse a checkpoint whose weights have the usual shapes, but stand for something else.

    It has norms less one, or may have the rows of gate and up projections in blocks: Megatron wrote such rows as the
    training had them, and later in the usual order, and records no difference. Or its indexer's rows are in the order
    of megatron-core 0.19.
    """
    names = ["moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"]
    if not expected.get("layernorm_zero_centered_gamma"):
        names += ["apply_layernorm_1p", "layernorm_zero_centered_gamma"]
    if expected.get("experimental_attention_variant") == "dsa":
        names += ["dsa_indexer_topk_freq"]
    for name in names:
        if args.get(name):
            raise ShapeMismatchError(
                f"{where} was written with {name} {args[name]}, which gives weights another meaning; allowed: none; "
                "load it with Megatron and save it without"
            )


def _same(given: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(given, int | float) and abs(given) < 2**1000:
        return math.isclose(given, expected, rel_tol=1e-6)
    return bool(given == expected)
