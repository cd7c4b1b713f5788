"""Whether a model can be trained with some settings, and divides over the ranks. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields

from slime_convert.shape import ModelShape
from slime_core.errors import ConfigError
from slime_megatron.settings.config import MegatronConfig, flag_name

# What a shape may say and the model here does; all else must be as it is by default.
_TRAINED = {
    *("rotary_base", "rotary_percent", "rotary_interleaved", "use_rope_scaling", "rope_scaling_factor"),
    *("rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_position_embeddings"),
    *("norm_epsilon", "add_qkv_bias", "qk_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
    *("untie_embeddings_and_output_weights", "num_experts", "moe_ffn_hidden_size", "moe_router_topk"),
    *("moe_router_pre_softmax", "moe_router_score_function", "moe_router_enable_expert_bias"),
    *("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk"),
    *("moe_shared_expert_intermediate_size", "moe_layer_freq", "mtp_num_layers"),
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("rope_type", "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "yarn_rounds_range"),
}
_LAST = "num_layers_in_last_pipeline_stage"
_UNEVEN = {
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    _LAST: "--decoder-last-pipeline-num-layers",
}
_PARTS = {"moe": "experts", "moe_act": "experts", "shared_experts": "shared experts", "mla_up_proj": "latent attention"}


def check_fits(config: MegatronConfig, shape: ModelShape) -> None:
    """Check that a model can be trained and divides over the ranks. Can be asked before a run.

    Raises:
        ConfigError: It has parts that :mod:`slime_megatron.model.build` lacks, or a size does not divide: everything
            that is wrong, a line each, with the numbers that would do.
    """
    if problems := list(misfits(config, shape)):
        raise ConfigError("\n".join(problems))


def misfits(config: MegatronConfig, shape: ModelShape) -> Iterator[str]:
    """Problems of settings for a model; a line each, with the numbers that would do."""
    others = [
        f"{field.name} {getattr(shape, field.name)}"
        for field in fields(shape)
        if field.default is not MISSING and field.name not in _TRAINED and getattr(shape, field.name) != field.default
    ]
    if others or shape.position_embedding_type != "rope":
        others = others or [f"position_embedding_type {shape.position_embedding_type}"]
        yield (
            f"the model is of the family {shape.family} and has {', '.join(others)}, which cannot be trained yet; "
            "give --hf-checkpoint a model without (slime-convert converts both kinds)"
        )
    else:
        yield from config.selection.misfits(shape)
        yield from config.lora.misfits(shape) if config.lora is not None else ()
    heads = {"num_attention_heads": shape.num_attention_heads, "ffn_hidden_size": shape.ffn_hidden_size}
    if not shape.multi_latent_attention:
        heads["num_query_groups"] = shape.num_query_groups
    if shape.moe_shared_expert_intermediate_size is not None:
        heads["moe_shared_expert_intermediate_size"] = shape.moe_shared_expert_intermediate_size
    yield from _not_divided("tensor_model_parallel_size", config.tensor_model_parallel_size, heads)
    yield from _pipeline_misfits(config, shape)
    experts = config.expert_model_parallel_size
    if shape.num_experts is None:
        if experts > 1:
            yield f"--expert-model-parallel-size {experts}: the model has no experts; leave it out"
        if config.use_routing_replay:
            yield "--use-routing-replay: the model has no experts; leave it out"
    else:
        yield from _not_divided("expert_model_parallel_size", experts, {"num_experts": shape.num_experts})
        ffn = {"moe_ffn_hidden_size": shape.moe_ffn_hidden_size or 0}
        yield from _not_divided("expert_tensor_parallel_size", config.expert_tensor_size, ffn)
        if experts == 1 and config.expert_tensor_size != config.tensor_model_parallel_size:
            # Megatron-core 0.16.1 then never sums the experts' gradients over the ranks that have copies.
            yield (
                f"--expert-tensor-parallel-size {config.expert_tensor_size} differs from --tensor-model-parallel-size "
                f"{config.tensor_model_parallel_size}, which needs --expert-model-parallel-size 2 or more"
            )
    there = {
        "moe": shape.num_experts,
        "moe_act": shape.num_experts,
        "shared_experts": shape.moe_shared_expert_intermediate_size,
        "mla_up_proj": shape.multi_latent_attention,
    }
    for module in config.recompute_modules or ():
        if not there.get(module, True):
            yield f"--recompute-modules {module}: the model has no {_PARTS[module]}; leave it out"
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        # Without it, Megatron-core 0.16.1 counts gradients of latent attention's norms once per rank, and refuses
        # to train experts.
        kinds = {"experts": shape.num_experts is not None, "latent attention": shape.multi_latent_attention}
        if found := [kind for kind, is_there in kinds.items() if is_there]:
            yield (
                f"--tensor-model-parallel-size {config.tensor_model_parallel_size} of a model with "
                f"{' and '.join(found)} needs --sequence-parallel; add it"
            )


def stage_layers(config: MegatronConfig, num_layers: int) -> list[int]:
    """Layers that each rank of a pipeline holds: equally many, but for what Megatron's arguments say of the ends."""
    ranks, ends = config.pipeline_model_parallel_size, _given_ends(config)
    others = ranks - len(ends)
    rest = num_layers - sum(ends.values())
    return [ends.get(rank, rest // others if others else 0) for rank in range(ranks)]


def layer_stages(config: MegatronConfig, num_layers: int) -> list[int]:
    """The pipeline rank that holds each layer."""
    virtual = config.virtual_pipeline_model_parallel_size or 1
    # A rank's layers are in as many runs of the same length as it has virtual stages.
    ranks = [rank for rank, held in enumerate(stage_layers(config, num_layers)) for _ in range(held // virtual)]
    return ranks * virtual


def _given_ends(config: MegatronConfig) -> dict[int, int]:
    """Layers of the first and the last rank of the pipeline, where they are given, by rank."""
    ends = {0: "num_layers_in_first_pipeline_stage", config.pipeline_model_parallel_size - 1: _LAST}
    given = {rank: config.megatron_args.get(name) for rank, name in ends.items()}
    return {rank: layers for rank, layers in given.items() if isinstance(layers, int)}


def _pipeline_misfits(config: MegatronConfig, shape: ModelShape) -> Iterator[str]:
    ranks, virtual = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    parts = f" × --virtual-pipeline-model-parallel-size {virtual}" if virtual > 1 else ""
    given = {name: config.megatron_args[name] for name in _UNEVEN if name in config.megatron_args}
    if not given:
        sizes = {"num_layers": shape.num_layers}
        yield from _not_divided("pipeline_model_parallel_size", ranks * virtual, sizes, parts, ranks)
        return
    words = " and ".join(f"{_UNEVEN[name]} {layers}" for name, layers in given.items())
    if ranks == 1:
        yield f"{words}: there is no pipeline; give --pipeline-model-parallel-size too, or leave it out"
        return
    if ranks == len(given) and virtual > 1:  # Megatron-core 0.16.1 then divides by zero
        yield f"{words} with --virtual-pipeline-model-parallel-size {virtual} say the same twice; leave one of them out"
        return
    layers = stage_layers(config, shape.num_layers)
    if sum(layers) != shape.num_layers or any(number < 1 or number % virtual for number in layers):
        yield (
            f"{words} with --pipeline-model-parallel-size {ranks}{parts} make stages of {', '.join(map(str, layers))} "
            f"layers, but the model has {shape.num_layers}, and each stage needs a multiple of {virtual}; change them"
        )


def _not_divided(
    dest: str, parts: int, sizes: dict[str, int], further: str = "", given: int | None = None
) -> Iterator[str]:
    for name, size in sizes.items():
        if size % parts:
            limit = min(sizes.values())
            fitting = [str(n) for n in range(1, limit + 1) if all(s % n == 0 for s in sizes.values())]
            shown = ", ".join(fitting if len(fitting) <= 16 else [*fitting[:15], "…"])
            product = " in all" if further else ""
            yield (
                f"{flag_name(dest)} {parts if given is None else given}{further} does not divide the model's {name} "
                f"{size}; allowed{product}: {shown}"
            )
            return
