"""A stock megatron-core model on a CPU: loads ``torch_dist`` checkpoints and writes its logits.

Run as ``python stock_logits.py JOBS``; ``JOBS`` is a JSON list of ``checkpoint`` (an iteration) and ``logits`` (a file
to write). The model is built from the arguments that the checkpoint records, as a trainer would from its flags.
"""

import json
import sys
import tempfile

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils

from slime_convert.torch_dist import TorchDistReader

SAME = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization "
    "add_qkv_bias qk_layernorm add_bias_linear moe_ffn_hidden_size moe_router_topk moe_router_pre_softmax "
    "moe_router_score_function moe_shared_expert_intermediate_size moe_shared_expert_gate moe_layer_freq"
)


class CausalAttention(torch.nn.Module):
    """Megatron's ``core_attention`` as one call of torch."""

    def __init__(self, *_, softmax_scale=None, **__):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query_SBHE, key_SBHE, value_SBHE, *_, **__):
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query_SBHE, key_SBHE, value_SBHE))
        output_BHSE = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=True
        )
        return output_BHSE.permute(2, 0, 1, 3).flatten(2)


def build(args):
    config = TransformerConfig(
        **{name: args[name] for name in SAME.split() if name in args},
        num_moe_experts=args["num_experts"],
        layernorm_epsilon=args["norm_epsilon"],
        gated_linear_unit=args["swiglu"],
        activation_func=torch.nn.functional.silu,
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = CausalAttention
    return GPTModel(
        config,
        spec,
        vocab_size=args["padded_vocab_size"],
        max_sequence_length=args["max_position_embeddings"],
        position_embedding_type=args["position_embedding_type"],
        rotary_percent=args["rotary_percent"],
        rotary_base=args["rotary_base"],
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
    )


def main(jobs):
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda self: self
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # defined with Transformer Engine only
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}-rendezvous", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    for job in jobs:
        model = build(TorchDistReader(job["checkpoint"]).args()).eval()
        state = {"model": model.sharded_state_dict()}
        model.load_state_dict(dist_checkpointing.load(state, job["checkpoint"])["model"])
        ids_BS = torch.arange(20)[None]
        with torch.no_grad():
            torch.save(model(ids_BS, ids_BS, None), job["logits"])
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
