"""The shape flags in the workspace's ``scripts/models`` are those that the published configs give."""

import subprocess
from pathlib import Path

import pytest

from slime_convert import ModelShape

SCRIPTS = next((root / "scripts/models" for root in Path(__file__).parents if (root / "scripts/models").is_dir()), None)
pytestmark = pytest.mark.skipif(SCRIPTS is None, reason="outside the workspace there are no scripts")

QWEN3 = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
LLAMA3 = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}


def sizes(layers, hidden, ffn, heads):
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
    }


def scaling(factor):
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


# The values of each model's published config.json.
CONFIGS = {
    "smollm2-135M": {
        "model_type": "llama",
        **sizes(30, 576, 1536, 9),
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6B": {**QWEN3, **sizes(28, 1024, 3072, 16)},
    "qwen3-1.7B": {**QWEN3, **sizes(28, 2048, 6144, 16)},
    "qwen3-4B": {**QWEN3, **sizes(36, 2560, 9728, 32)},
    "qwen3-8B": {**QWEN3, **sizes(36, 4096, 12288, 32), "tie_word_embeddings": False},
    "llama3.1-8B": {
        **LLAMA3,
        **sizes(32, 4096, 14336, 32),
        "tie_word_embeddings": False,
        "rope_scaling": scaling(8.0),
    },
    "llama3.2-3B": {**LLAMA3, **sizes(28, 3072, 8192, 24), "tie_word_embeddings": True, "rope_scaling": scaling(32.0)},
}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_script_gives_the_flags_of_the_config(name):
    source = f'source "{SCRIPTS / name}.sh" && printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    words = subprocess.run(["bash", "-euc", source], capture_output=True, text=True, check=True, timeout=30).stdout
    assert words.split() == ModelShape.from_hf_config(CONFIGS[name]).to_megatron_flags()


def test_every_script_is_checked():
    assert {path.stem for path in SCRIPTS.glob("*.sh")} == set(CONFIGS)
