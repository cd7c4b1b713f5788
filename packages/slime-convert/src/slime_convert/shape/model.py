"""`ModelShape`: each of its fields where it stands, with the flag of Megatron's that sets it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from slime_convert.errors import HfConfigError, UnsupportedModelError
from slime_convert.families import FAMILIES, shape_values, unknown_family
from slime_convert.shape.flags import KINDS, ShapeFlag, shape_field, shape_flags

_MAX = {"num_layers": 100_000, "num_experts": 1_000_000, "mtp_num_layers": 1_000}
_MAY_BE_ZERO = ("mtp_num_layers", "mscale", "mscale_all_dim", "glu_linear_offset", "window_size")
_ADVICE = "correct the model's config"


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder's shape, under Megatron's argument names.

    ``family`` is Hugging Face's ``model_type`` and picks the weight table. Lists have an entry for each layer.

    Raises:
        UnsupportedModelError: Unknown family.
        HfConfigError: A size is not positive, or the query heads or experts do not divide over their groups.
    """

    family: str
    swiglu: bool = shape_field("gated MLP with SiLU", True, megatron="gated_linear_unit")
    quick_geglu: bool = shape_field("gated MLP with GELU's sigmoid approximation", False)
    gelu_tanh: bool = False  # gated MLP with GELU's tanh approximation; Megatron has no flag for it
    glu_linear_offset: float = shape_field("term added to the gated MLP's linear half", 0.0)
    activation_func_clamp_value: float | None = shape_field("bound of the gated MLP's halves", None)
    num_layers: int = shape_field("transformer layers")
    hidden_size: int = shape_field("channels of the residual stream")
    ffn_hidden_size: int = shape_field("channels between the MLP's two projections")
    num_attention_heads: int = shape_field("query heads")
    num_query_groups: int = shape_field("key-value heads", when="grouped heads")
    kv_channels: int = shape_field("channels of one attention head", when="plain attention")
    vocab_size: int = shape_field("rows of the embedding before padding")
    # A shorter context than the config's does not contradict it: nothing in the weights depends on it.
    max_position_embeddings: int = shape_field("longest context in tokens", compared=False)
    rotary_base: float = shape_field("base of the rotary wavelengths", 10000.0, when="always")
    rotary_percent: float = shape_field("part of a head's channels that is rotated", 1.0)
    rotary_interleaved: bool = shape_field("the rotary embedding pairs neighbouring channels", False)
    rotary_seq_len_interpolation_factor: float | None = shape_field("divisor of all rotary positions", None)
    rotary_base_local: float | None = None  # base in layers with a window, where it is another
    use_rope_scaling: bool = shape_field("Llama 3.x scaling of the low rotary frequencies", False)
    rope_scaling_factor: float = shape_field("divisor of the low rotary frequencies", 8.0, when="llama3 scaling")
    rope_low_freq_factor: float = 1.0  # wavelengths above original context / this are divided in full
    rope_high_freq_factor: float = 4.0  # wavelengths below original context / this are left alone
    rope_original_max_position_embeddings: int = 8192
    norm_epsilon: float = shape_field(
        "term added to the mean square in the norm", 1e-6, when="always", megatron="layernorm_epsilon"
    )
    layernorm_zero_centered_gamma: bool = shape_field("norms scale by weight + 1", False, flag="--apply-layernorm-1p")
    add_bias_linear: bool = False
    add_qkv_bias: bool = shape_field("biases in the query, key and value projections", False)
    qk_layernorm: bool = shape_field("RMSNorm on each query and key head", False)
    post_self_attn_layernorm: bool = shape_field("RMSNorm on attention's output", False)
    post_mlp_layernorm: bool = shape_field("RMSNorm on the MLP's output", False)
    softmax_type: str = shape_field("learnable, for heads with a logit of their own (sinks)", "vanilla")
    softmax_scale: float | None = None  # factor on the attention's scores, where it is not kv_channels ** -0.5
    window_size: int | None = None  # earlier positions that a position attends to, in layers with a window
    window_attn_skip_freq: tuple[int, ...] | None = shape_field(
        "which layers have a window: 1 for those that do, or N for all but each N-th", None
    )
    attention_output_gate: bool = shape_field("a gate on attention's output", False)
    scale_embeddings: bool = False  # embeddings are multiplied by the square root of hidden_size
    untie_embeddings_and_output_weights: bool = shape_field("an output layer of its own", False)
    num_experts: int | None = shape_field("experts of a layer", None, megatron="num_moe_experts")
    moe_ffn_hidden_size: int | None = shape_field("channels between an expert's two projections", None)
    moe_router_topk: int | None = shape_field("experts per token", None)
    moe_router_pre_softmax: bool = shape_field("the softmax is taken before experts are chosen", False)
    moe_router_score_function: str = shape_field("how the router scores experts", "softmax", when="experts")
    moe_router_enable_expert_bias: bool = shape_field("a bias on the scores by which experts are chosen", False)
    moe_router_topk_scaling_factor: float = shape_field("factor on the chosen experts' weights", 1.0)
    moe_router_num_groups: int | None = shape_field("groups of experts", None)
    moe_router_group_topk: int | None = shape_field("groups from which experts are chosen", None)
    moe_shared_expert_intermediate_size: int | None = shape_field("channels of the shared expert", None)
    moe_shared_expert_gate: bool = shape_field("a gate on that expert's output", False)
    moe_layer_freq: tuple[int, ...] | int = shape_field(
        "which layers have experts: 1 for all, or a list with 0 or 1 for each, such as ([0]*3+[1]*58)", 1
    )
    mtp_num_layers: int = shape_field("modules that predict a further token", 0)
    multi_latent_attention: bool = shape_field("queries, keys and values from low-rank latents", False)
    q_lora_rank: int | None = shape_field("channels of the queries' latent", None)
    kv_lora_rank: int | None = shape_field("channels of the latent of keys and values", None, when="latent attention")
    qk_head_dim: int | None = shape_field("unrotated channels of a query or key head", None, when="latent attention")
    qk_pos_emb_head_dim: int | None = shape_field("rotated channels of such a head", None, when="latent attention")
    v_head_dim: int | None = shape_field("channels of a value head", None, when="latent attention")
    rope_type: str = shape_field("rope, or yarn for scaled rotary frequencies", "rope", when="latent attention")
    rotary_scaling_factor: float = shape_field("YaRN's factor on the context length", 1.0, when="yarn")
    original_max_position_embeddings: int = shape_field("context before YaRN's scaling", 4096, when="latent yarn")
    beta_fast: float = shape_field("YaRN's bound of fast rotations", 32.0)
    beta_slow: float = shape_field("YaRN's bound of slow rotations", 1.0)
    mscale: float = shape_field("YaRN's coefficient of the rotated channels' factor", 1.0, when="yarn")
    mscale_all_dim: float = shape_field("YaRN's coefficient of the scores' factor", 0.0, when="yarn")
    yarn_rounds_range: bool = True  # YaRN's range of channels is rounded to whole ones
    experimental_attention_variant: str | None = shape_field("gated_delta_net, or dsa", None)
    linear_attention_freq: tuple[int, ...] | None = shape_field(
        "which layers have linear attention: 1 for those that do, or N for all but each N-th", None
    )
    linear_conv_kernel_dim: int | None = shape_field("length of linear attention's convolution", None)
    linear_key_head_dim: int | None = shape_field("channels of one of its key heads", None)
    linear_value_head_dim: int | None = shape_field("channels of one of its value heads", None)
    linear_num_key_heads: int | None = shape_field("its key heads", None)
    linear_num_value_heads: int | None = shape_field("its value heads", None)
    dsa_indexer_n_heads: int | None = shape_field("heads of sparse attention's indexer", None)
    dsa_indexer_head_dim: int | None = shape_field("channels of one of them", None)
    dsa_indexer_topk: int | None = shape_field("positions that the indexer chooses", None)

    derived_flags: ClassVar[tuple[ShapeFlag, ...]] = (
        # Megatron reads num_query_groups only with this switch; with as many groups as heads it changes nothing.
        ShapeFlag("--group-query-attention", bool, "queries share key-value heads", "grouped heads", compared=False),
        ShapeFlag("--use-rotary-position-embeddings", bool, "rotary position embedding", "not plain yarn"),
        ShapeFlag("--position-embedding-type", str, "position embedding", "plain yarn", "position_embedding_type"),
        ShapeFlag("--normalization", str, "kind of normalization", "always", "normalization"),
        ShapeFlag("--disable-bias-linear", bool, "no biases in linear layers", "no biases"),
        ShapeFlag("--window-size", str, "earlier and later positions that a position attends to", "window", "window"),
        ShapeFlag(
            "--yarn-original-max-position-embeddings",
            int,
            "context before YaRN's scaling, without latent attention",
            "plain yarn",
            "original_max_position_embeddings",
        ),
        ShapeFlag("--yarn-beta-fast", float, "YaRN's bound of fast rotations, likewise", "plain yarn", "beta_fast"),
        ShapeFlag("--yarn-beta-slow", float, "YaRN's bound of slow rotations, likewise", "plain yarn", "beta_slow"),
        ShapeFlag("--no-yarn-correction-range-round-to-int", bool, "YaRN's range is not rounded", "unrounded yarn"),
    )
    normalization: ClassVar[str] = "RMSNorm"

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise UnsupportedModelError(unknown_family(self.family, "this ModelShape"))
        for name, value in vars(self).items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or (not value and name in _MAY_BE_ZERO):
                continue
            if not 0 < value < math.inf:
                raise HfConfigError(f"{name} {value} must be positive and finite; {_ADVICE}")
            if value > _MAX.get(name, math.inf):
                raise HfConfigError(f"{name} {value} must be at most {_MAX[name]}; {_ADVICE}")
        sizes = {name: getattr(self, name) for name in ("num_experts", "moe_ffn_hidden_size", "moe_router_topk")}
        if len({value is None for value in sizes.values()}) > 1:
            raise HfConfigError(f"{sizes} go together; give all three or none")
        heads, shared = self.num_attention_heads, self.num_query_groups
        experts, topk = self.num_experts or 0, self.moe_router_topk or 0
        groups, chosen = self.moe_router_num_groups or 1, self.moe_router_group_topk or 1
        held = chosen * (experts // groups)
        # Megatron asserts the last three only when it builds a model; transformers mixes the experts of tokens up.
        for is_wrong, rule in (
            (heads % shared, f"num_attention_heads {heads} must be a multiple of num_query_groups {shared}"),
            (topk > experts, f"moe_router_topk {topk} must be at most num_experts {experts}"),
            (experts % groups, f"num_experts {experts} must be a multiple of moe_router_num_groups {groups}"),
            (chosen > groups, f"moe_router_group_topk {chosen} must be at most moe_router_num_groups {groups}"),
            (
                topk > held,
                f"moe_router_topk {topk} must be at most the {held} experts of the moe_router_group_topk {chosen} "
                "groups chosen",
            ),
        ):
            if is_wrong:
                raise HfConfigError(f"{rule}; {_ADVICE}")

    @classmethod
    def from_hf_config(cls, source: str | Path | Mapping[str, Any]) -> ModelShape:
        """The shape that a Hugging Face config describes.

        Args:
            source: A model directory, a ``config.json``, or the config as a mapping. Both places of the rotary
                settings are understood: ``rope_parameters`` (transformers 5) and ``rope_theta`` with ``rope_scaling``.
                A quantized model has the shape of the same model unquantized.

        Raises:
            HfConfigError: There is no ``config.json``, it is not a JSON object, or a key is missing or of a wrong type.
            UnsupportedModelError: The model type, or one of its settings, is not supported.
        """
        return cls(**shape_values(source))

    def to_megatron_flags(self) -> list[str]:
        """The flags that give Megatron this shape, as words of a command line (values follow their flags)."""
        return [word for flag in SHAPE_FLAGS for word in flag.words(self)]

    def to_megatron_args(self) -> dict[str, Any]:
        """The arguments that a Megatron checkpoint of this shape records, by Megatron's names, as plain values.

        Megatron has no name for the family: ``hf_model_type`` is not one of its arguments.
        """
        left_out = {"family", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_position_embeddings"}
        recorded = _RECORDED | (_RECORDED_OF_EXPERTS if self.num_experts is not None else set())
        recorded |= _RECORDED_OF_LATENT if self.multi_latent_attention else set()
        values: dict[str, Any] = {"hf_model_type": self.family}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in left_out and (field.name in recorded or value != field.default):
                values[field.name] = list(value) if isinstance(value, tuple) else value
        values |= {name: getattr(self, name) for name in ("normalization", "position_embedding_type")}
        return values | {"group_query_attention": KINDS["grouped heads"](self)}

    def megatron_values(self, known: Collection[str]) -> dict[str, Any]:
        """The values of megatron-core's configs that the shape sets, of the fields ``known``, by its names."""
        values = {other: getattr(self, name) for name, other in MEGATRON_NAMES.items()}
        is_gated = self.swiglu or self.quick_geglu or self.gelu_tanh
        values |= {"normalization": self.normalization, "gated_linear_unit": is_gated}
        return {name: list(x) if isinstance(x, tuple) else x for name, x in values.items() if name in known}

    @property
    def position_embedding_type(self) -> str:
        """Megatron's name of the position embedding."""
        return "yarn" if self.rope_type == "yarn" and not self.multi_latent_attention else "rope"

    @property
    def window(self) -> str | None:
        """The window as Megatron's flag has it: earlier and later positions."""
        return None if self.window_size is None else f"{self.window_size},0"

    def has_layer(self, kind: str, layer: int) -> bool:
        """Whether a layer is of a kind: ``experts`` or ``dense``; ``linear`` or ``full`` attention.

        Prediction modules count as further layers: with experts if the last layer has them, and with full attention.
        """
        if kind in ("experts", "dense"):
            freq = self.moe_layer_freq
            listed = freq if isinstance(freq, tuple) else (1,)
            found = self.num_experts is not None and bool(listed[min(layer, len(listed) - 1)])
            return found == (kind == "experts")
        listed = self.linear_attention_freq or ()
        return (layer < len(listed) and bool(listed[layer])) == (kind == "linear")

    @property
    def equal_layers(self) -> bool:
        """Whether all layers have the same weights."""
        return self.moe_layer_freq == 1 and self.linear_attention_freq is None

    def padded_vocab_size(self, tensor_parallel: int, divisible_by: int = 128) -> int:
        """Rows of the embedding in Megatron: the vocabulary rounded up to ``divisible_by`` × ``tensor_parallel``."""
        multiple = divisible_by * tensor_parallel
        return -(-self.vocab_size // multiple) * multiple


_NAMES = [field.name for field in dataclasses.fields(ModelShape)]


def _from(first: str, last: str) -> set[str]:
    return set(_NAMES[_NAMES.index(first) : _NAMES.index(last) + 1])


_RECORDED = {
    *("swiglu", "norm_epsilon", "add_bias_linear", "untie_embeddings_and_output_weights"),
    *_from("num_layers", "rotary_interleaved"),
    *_from("use_rope_scaling", "rope_scaling_factor"),
    *_from("add_qkv_bias", "post_mlp_layernorm"),
}
_RECORDED_OF_EXPERTS = _from("num_experts", "mtp_num_layers")
_RECORDED_OF_LATENT = _from("multi_latent_attention", "mscale_all_dim")

MEGATRON_NAMES: Mapping[str, str] = {
    field.name: field.metadata.get("megatron") or field.name for field in dataclasses.fields(ModelShape)
}
"""Megatron-core's name of each field of a shape, if its configs have one."""

SHAPE_FLAGS: tuple[ShapeFlag, ...] = shape_flags(ModelShape)
"""Every shape flag that is accepted, in the order in which they are written."""
