from importlib.metadata import version

import pytest

from slime_convert.check import check_model, check_models
from slime_convert.mapping import WeightMap
from support.shapes import QWEN3_CONFIG as QWEN3

LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
MIMO = {key: value for key, value in QWEN3.items() if key != "tie_word_embeddings"} | {
    "model_type": "mimo",
    "num_nextn_predict_layers": 1,
}
THERE_AND_BACK = ["there and back, float32", "there and back, bfloat16", "transformers"]


def outcomes(result):
    return {row.name: row.outcome for row in result.rows}


def exchanged(name):
    """The name of a weight that is mistaken for another."""
    pairs = ("gate_proj", "up_proj"), ("token_layernorm", "hidden_layernorm")
    for one, other in pairs:
        if one in name or other in name:
            return name.replace(one, other) if one in name else name.replace(other, one)
    return name


@pytest.mark.parametrize(
    ("config", "lacks"),
    [
        (
            QWEN3 | {"model_type": "llama", "rope_scaling": LLAMA3 | {"low_freq_factor": 2.0}},
            "other constants of Llama 3's rotary scaling than 3.1's",
        ),
        (QWEN3 | {"model_type": "glm4", "pad_token_id": 0}, "norms behind attention and MLP"),
    ],
)
def test_what_stock_core_lacks_is_said_and_the_rest_passes(config, lacks):
    result = check_model(config)
    assert outcomes(result) == dict.fromkeys(THERE_AND_BACK, "passed") | {"Megatron": "not run", "export": "not run"}
    assert result.rows[-1].detail.startswith(f"megatron-core {version('megatron-core')} lacks {lacks}")


def test_weights_taken_for_others_come_back_but_fail_in_megatron(monkeypatch):
    from_hf, huggingface = WeightMap.from_hf, WeightMap.huggingface
    monkeypatch.setattr(
        WeightMap, "from_hf", lambda self, name, load: from_hf(self, name, lambda hf: load(exchanged(hf)))
    )
    monkeypatch.setattr(WeightMap, "huggingface", lambda self, hf, load: huggingface(self, exchanged(hf), load))
    for result in check_models([QWEN3, MIMO]):
        wrong = {"Megatron": "failed", "export": "failed"}
        assert outcomes(result) == dict.fromkeys(THERE_AND_BACK, "passed") | wrong
        assert not result.passed
