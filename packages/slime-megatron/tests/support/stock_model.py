"""A stock Megatron-core model, of Megatron's own layers, that loads a converted checkpoint: for tests.

Notation: B rows, S positions, H heads, E channels, V vocabulary.
"""

import torch
import torch.distributed as dist


def stock_logits(shape, checkpoint, tokens, save, rendezvous, *, tensor_parallel=1, expert_parallel=1):
    """Logits of every position over the whole vocabulary, B × S × V, computed on ranks that share the model.

    The model is saved again to the directory ``save``.
    """
    from slime_megatron.ranks.device import select_device

    select_device(1)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core import tensor_parallel as mesh
    from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy

    from slime_megatron.checkpoints.writer import prepared, write_state

    class InProcess(SaveShardedStrategy):
        can_handle_sharded_objects = True

        def save(self, sharded_state_dict, checkpoint_dir):
            write_state(prepared(sharded_state_dict), checkpoint_dir)

    where = f"file://{rendezvous.file}"
    dist.init_process_group("gloo", init_method=where, rank=rendezvous.rank, world_size=rendezvous.world_size)
    try:
        parallel_state.initialize_model_parallel(
            tensor_parallel, expert_model_parallel_size=expert_parallel, expert_tensor_parallel_size=1
        )
        mesh.model_parallel_cuda_manual_seed(1)
        _define_what_transformer_engine_would()
        model = _model(shape, tensor_parallel, expert_parallel).eval()
        state = dist_checkpointing.load({"model": model.sharded_state_dict()}, checkpoint)
        model.load_state_dict(state["model"])
        tokens_BS = torch.tensor(tokens)
        dist_checkpointing.save(model.sharded_state_dict(), save, InProcess("torch_dist", 1))
        positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
        # Prediction modules take no part in the logits; Megatron runs them only with labels.
        model.mtp_process, model.config.mtp_num_layers = False, None
        with torch.no_grad():
            logits_BSV = model(tokens_BS, positions_BS, None)
        group = parallel_state.get_tensor_model_parallel_group()
        parts = [torch.empty_like(logits_BSV) for _ in range(group.size())]
        dist.all_gather(parts, logits_BSV.contiguous(), group=group)
        return torch.cat(parts, dim=-1)[..., : shape.vocab_size].numpy()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _define_what_transformer_engine_would():
    """Names that megatron-core 0.16.1 asks for, but defines only where Transformer Engine is installed."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    for name in ("Linear", "TELinear", "TEColumnParallelLinear"):
        if not isinstance(getattr(multi_latent_attention, name), type):
            setattr(multi_latent_attention, name, type(name, (), {}))
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)


def _model(shape, tensor_parallel, expert_parallel):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    args = shape.to_megatron_args()
    same = (
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization "
        "qk_layernorm add_qkv_bias add_bias_linear rotary_interleaved "
        "moe_ffn_hidden_size moe_router_topk moe_router_pre_softmax moe_router_score_function "
        "moe_router_enable_expert_bias moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk "
        "moe_shared_expert_intermediate_size moe_layer_freq "
        "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_scaling_factor "
        "original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim"
    )
    latent = {"rotary_base": args["rotary_base"]} if "multi_latent_attention" in args else {}
    config = (MLATransformerConfig if latent else TransformerConfig)(
        **latent,
        **{name: args[name] for name in same.split() if name in args},
        num_moe_experts=args.get("num_experts"),
        mtp_num_layers=args.get("mtp_num_layers") or None,
        layernorm_epsilon=args["norm_epsilon"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tensor_parallel,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=1,
        # Megatron wants it for experts under tensor parallelism.
        sequence_parallel=tensor_parallel > 1,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        _use_parts_for_cpus(layer.submodules)
    spec.layer_norm = _norm()
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
    for module in mtp.layer_specs if mtp else ():
        module.submodules.enorm = module.submodules.hnorm = module.submodules.layer_norm = _norm()
    return GPTModel(
        config,
        spec,
        vocab_size=shape.padded_vocab_size(1),
        max_sequence_length=shape.max_position_embeddings,
        position_embedding_type="rope",
        rotary_percent=args["rotary_percent"],
        rotary_base=args["rotary_base"],
        rope_scaling=args["use_rope_scaling"],
        mtp_block_spec=mtp,
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
    )


def _norm():
    from slime_megatron.model.parts import RMSNorm

    return RMSNorm


def _use_parts_for_cpus(layer):
    """Norms that allow sequence parallelism, and attention without Megatron's kernels; the rest stays Megatron's."""
    from megatron.core.transformer.identity_op import IdentityOp

    parts = layer.self_attention.submodules
    parts.core_attention = CausalAttention
    in_attention = ("q_layernorm", "k_layernorm", "kv_layernorm")
    for owner, names in ((layer, ("input_layernorm", "pre_mlp_layernorm")), (parts, in_attention)):
        for name in names:
            if getattr(owner, name, IdentityOp) is not IdentityOp:
                setattr(owner, name, _norm())


class CausalAttention(torch.nn.Module):
    """Megatron's ``core_attention`` as one call of torch."""

    def __init__(self, config, *args, softmax_scale=None, **kwargs):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query_SBHE, key_SBHE, value_SBHE, *args, **kwargs):
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query_SBHE, key_SBHE, value_SBHE))
        output_BHSE = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return output_BHSE.permute(2, 0, 1, 3).flatten(2)
