"""Settings of runs that others published, and the shapes of their models."""

import dataclasses

from slime_convert.published import PUBLISHED
from slime_convert.shape import ModelShape
from slime_launch.flags import parse_train
from slime_launch.plan.engines import engine_groups, engine_memory


def llama(layers, hidden, ffn, heads, groups, vocab=32000):
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }


# Layers, widths and vocabularies from the models' published config.json.
OTHERS = {
    "llama2-7B": llama(32, 4096, 11008, 32, 32),
    "llama-13B": llama(40, 5120, 13824, 40, 40),
    "llama-33B": llama(60, 6656, 17920, 52, 52),
    "llama3.2-90B": llama(100, 8192, 28672, 64, 8, 128256),
    "mistral-7B": llama(32, 4096, 14336, 32, 8),
    "baichuan2-13B": llama(40, 5120, 13696, 40, 40, 125696),
    "qwen2-72B": llama(80, 8192, 29568, 64, 8, 152064),
}


def shape_of(model):
    return PUBLISHED[model].shape if model in PUBLISHED else ModelShape.from_hf_config(OTHERS[model])


def settings_of(case):
    words = ["--hf-checkpoint", "hf", "--load", "hf", "--prompt-data", "p.jsonl", "--num-rollout", "1"]
    words += ["--rollout-batch-size", "8", "--actor-num-gpus-per-node", str(min(case["gpus"], 8))]
    words += ["--actor-num-nodes", str(max(1, case["gpus"] // 8))]
    words += ["--rollout-num-gpus-per-engine", str(case.get("engine_gpus", 1))]
    words += ["--colocate"] if case.get("colocate") else ["--rollout-num-gpus", str(case.get("rollout_gpus", 1))]
    words += ["--advantage-estimator", "ppo"] if case.get("critic") else []
    settings = parse_train(words)
    offload = {"megatron_args": {"optimizer_cpu_offload": True}} if case.get("cpu_optimizer") else {}
    megatron = dataclasses.replace(settings.megatron, **{"bf16": True} | offload | case["flags"])
    args = {"mem-fraction-static": case["mem_fraction"]} if "mem_fraction" in case else {}
    engine = dataclasses.replace(settings.engine, sglang_args=args)
    return dataclasses.replace(settings, megatron=megatron, engine=engine)


def memory_of_engine(settings, shape, device):
    [group] = engine_groups(settings, None)
    return engine_memory(settings, shape, device, group)
