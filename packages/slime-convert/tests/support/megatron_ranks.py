"""Two ranks of a real megatron-core model on a CPU, which write legacy checkpoints as Megatron-LM does.

Run as ``python megatron_ranks.py RANK DIRECTORY JOBS``; ``JOBS`` is a JSON list of what to write, one after another.
The weights come from a ``torch_dist`` checkpoint that megatron-core itself loads and splits.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from slime_convert import ModelShape


def transformer_config(shape, job):
    pp = job.get("pp", 1)
    uneven = {"num_layers_in_first_pipeline_stage": job["first"]} if "first" in job else {}
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        ffn_hidden_size=shape.ffn_hidden_size,
        normalization="RMSNorm",
        qk_layernorm=shape.qk_layernorm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=job.get("tp", 1),
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=job.get("vpp"),
        **uneven,
    )


def build_chunks(shape, job):
    """The model's chunks of this rank: one, or one for each virtual stage."""
    config, chunks = transformer_config(shape, job), []
    stage, last_stage = parallel_state.get_pipeline_model_parallel_rank(), job.get("pp", 1) - 1
    for virtual_stage in range(job.get("vpp") or 1):
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=shape.qk_layernorm, normalization="RMSNorm"),
            vocab_size=shape.padded_vocab_size(job.get("tp", 1)),
            max_sequence_length=shape.max_position_embeddings,
            pre_process=stage == 0 and virtual_stage == 0,
            post_process=stage == last_stage and virtual_stage == (job.get("vpp") or 1) - 1,
            share_embeddings_and_output_weights=not shape.untie_embeddings_and_output_weights,
            position_embedding_type="rope",
            vp_stage=virtual_stage if job.get("vpp") else None,
        )
        chunks.append(model.bfloat16())
    return chunks


def load(chunks, torch_dist):
    loaded = dist_checkpointing.load({i: chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}, torch_dist)
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[i])


def optimizer_state(chunks):
    """Adam's state after a step that changes nothing, in the shape of Megatron's mixed-precision optimizer."""
    masters = [torch.nn.Parameter(p.detach().float()) for chunk in chunks for p in chunk.parameters()]
    optimizer = torch.optim.Adam(masters, lr=0.0)
    for master in masters:
        master.grad = torch.randn_like(master)
    optimizer.step()
    return {"optimizer": optimizer.state_dict(), "fp32_from_fp16_params": [masters]}


def save(chunks, shape, job, rank):
    tp, pp = job.get("tp", 1), job.get("pp", 1)
    if parallel_state.get_data_parallel_rank() != 0:
        return
    args = argparse.Namespace(
        **shape.to_megatron_args(),
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=job.get("vpp"),
        expert_model_parallel_size=1,
        params_dtype=torch.bfloat16,
        model_type=ModelType.encoder_or_decoder,
        ckpt_format="torch",
        rank=rank,
    )
    states = [chunk.state_dict_for_save_checkpoint() for chunk in chunks]
    names = [f"model{number}" for number in range(len(chunks))] if job.get("vpp") else ["model"]
    random_state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
    }
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 5,
        **dict(zip(names, states, strict=True)),
        "optimizer": optimizer_state(chunks),
        "opt_param_scheduler": {"max_lr": 1e-6, "num_steps": 5},
        "rng_state": [random_state],
    }
    place = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if pp > 1:
        place += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    root = Path(job["save"])
    path = root / "iter_0000005" / place / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    torch.save(state, path)
    (root / "latest_checkpointed_iteration.txt").write_text("5")


def main(rank, directory, jobs):
    torch.set_num_threads(1)
    torch.Tensor.cuda = lambda self: self  # megatron-core moves tied embeddings to a GPU to compare them
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2)
    for job in jobs:
        parallel_state.initialize_model_parallel(
            job.get("tp", 1), job.get("pp", 1), virtual_pipeline_model_parallel_size=job.get("vpp")
        )
        shape = ModelShape.from_hf_config(job["origin"])
        chunks = build_chunks(shape, job)
        load(chunks, job["torch_dist"])
        save(chunks, shape, job, rank)
        dist.barrier()
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
