"""The names are those of the published checkpoints, of each kind one."""

import pytest

from slime_convert.conversions.quantized import (
    K2_IGNORE,
    default_ignore,
    is_ignored,
    left_alone,
    not_ignored,
    projections,
)
from slime_convert.errors import QuantizationError

MLA = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def deepseek(first_layer):
    """A dense layer, one with experts, and the MTP layer, as DeepSeek-V3 names them: with scales, and without."""
    dense, sparse, mtp = (f"model.layers.{first_layer + number}." for number in range(3))
    with_scales = [f"{layer}self_attn.{name}.weight" for layer in (dense, sparse, mtp) for name in MLA]
    with_scales += [f"{dense}mlp.{name}.weight" for name in MLP]
    for part in ("experts.0", "experts.255", "shared_experts"):
        with_scales += [f"{layer}mlp.{part}.{name}.weight" for layer in (sparse, mtp) for name in MLP]
    matrices = ["model.embed_tokens.weight", "lm_head.weight", f"{sparse}mlp.gate.weight", f"{mtp}mlp.gate.weight"]
    matrices += [f"{mtp}{name}.weight" for name in ("embed_tokens", "eh_proj", "shared_head.head")]
    vectors = ["model.norm.weight", f"{sparse}mlp.gate.e_score_correction_bias", f"{mtp}shared_head.norm.weight"]
    vectors += [f"{dense}input_layernorm.weight", f"{dense}self_attn.q_a_layernorm.weight", f"{mtp}enorm.weight"]
    shapes = dict.fromkeys(with_scales + matrices, (576, 7168)) | dict.fromkeys(vectors, (7168,))
    return shapes, with_scales, matrices


def test_deepseek_v3():
    shapes, with_scales, matrices = deepseek(0)
    assert sorted(projections(shapes)) == sorted(with_scales)
    assert left_alone(shapes, with_scales) == sorted(name.removesuffix(".weight") for name in matrices)


def test_deepseek_v32s_indexer():
    attention = "model.layers.0.self_attn.indexer."
    shapes = {f"{attention}{name}.weight": (128, 128) for name in ("wq_b", "wk", "weights_proj")}
    shapes |= {f"{attention}k_norm.weight": (128,), f"{attention}k_norm.bias": (128,)}
    assert projections(shapes) == [f"{attention}wq_b.weight", f"{attention}wk.weight"]


def test_qwen3_next():
    """The small projection, the convolution and the gates stay."""
    layer = "model.layers.0."
    with_scales = [f"{layer}linear_attn.in_proj_qkvz.weight", f"{layer}linear_attn.out_proj.weight"]
    with_scales += [f"{layer}mlp.shared_expert.{name}.weight" for name in MLP]
    others = [
        f"{layer}linear_attn.in_proj_ba.weight",
        f"{layer}mlp.gate.weight",
        f"{layer}mlp.shared_expert_gate.weight",
    ]
    shapes = dict.fromkeys(with_scales + others, (128, 128)) | {f"{layer}linear_attn.conv1d.weight": (128, 1, 4)}
    assert projections(shapes) == with_scales


def test_other_towers_stay_as_they_are():
    name = "layers.0.self_attn.q_proj.weight"
    towers = ["vision_tower.encoder.", "model.visual.", "audio_tower.", "mm_projector."]
    shapes = {prefix + name: (8, 8) for prefix in [*towers, "model.language_model."]}
    assert projections(shapes) == [f"model.language_model.{name}"]


def test_kimi_k2():
    """Its INT4 release packs the routed experts alone."""
    shapes, _, _ = deepseek(0)
    names = projections(shapes)
    assert default_ignore(names) == K2_IGNORE
    chosen = not_ignored(names, K2_IGNORE)
    assert sorted(chosen) == sorted(name for name in names if ".experts." in name)
    published = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    assert chosen == not_ignored(names, published)


def test_a_dense_model_keeps_its_output_layer():
    names = ["model.layers.0.mlp.up_proj.weight"]
    assert default_ignore(names) == ("lm_head",) and not_ignored(names, ("lm_head",)) == names


@pytest.mark.parametrize(
    ("module", "rule", "ignored"),
    [
        ("lm_head", "lm_head", True),
        ("model.lm_head", "lm_head", False),
        ("model.layers.1.mlp.up_proj", "re:.*mlp", True),
        ("model.layers.1.mlp.up_proj", "re:mlp", False),
        ("model.layers.1.mlp.up_proj", "model.layers.1", False),
    ],
)
def test_rules(module, rule, ignored):
    assert is_ignored(module, rule) == ignored


def test_what_cannot_be_chosen_is_told():
    with pytest.raises(QuantizationError, match="nothing to quantize"):
        projections({"model.layers.0.input_layernorm.weight": (8,), "lm_head.weight": (8, 8)})
    with pytest.raises(QuantizationError, match=r"experts\.gate_up_proj holds all experts of a layer in one tensor"):
        projections({"model.layers.0.mlp.experts.gate_up_proj": (4, 8, 8)})
    with pytest.raises(QuantizationError, match=r"ignore= re:\.\* leaves nothing to quantize"):
        not_ignored(["a.weight"], ["re:.*"])
    with pytest.raises(QuantizationError, match=r"ignore= re:\( is not a regular expression"):
        not_ignored(["a.weight"], ["re:("])
