import importlib.util
import json
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch
from transformers.utils import logging

from slime_convert.check import CheckResult, Row, check_model, check_models, proofs
from slime_convert.errors import CheckError, HfConfigError, UnsupportedModelError
from slime_convert.mapping import WeightMap

QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
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


def without(monkeypatch, package):
    """As if a package were not installed."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))


def test_importing_it_loads_nothing_heavy():
    code = "import sys, slime_convert.check; print({'torch', 'transformers', 'megatron'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_result_as_text_and_json():
    rows = (Row("transformers", True, "the same logits"), Row("Megatron", None, "megatron-core is not installed"))
    result = CheckResult("a tiny model", rows)
    assert result.passed
    assert result.to_text().splitlines() == [
        "a tiny model",
        "",
        "transformers  passed   the same logits",
        "Megatron      not run  megatron-core is not installed",
        "",
        "passed",
    ]
    failed = CheckResult("a tiny model", (*rows, Row("export", False, "a weight differs")))
    assert not failed.passed
    assert failed.to_text().endswith("\n\nfailed")
    assert json.loads(json.dumps(failed.to_json())) == {
        "passed": False,
        "model": "a tiny model",
        "rows": [
            {"name": "transformers", "outcome": "passed", "detail": "the same logits"},
            {"name": "Megatron", "outcome": "not run", "detail": "megatron-core is not installed"},
            {"name": "export", "outcome": "failed", "detail": "a weight differs"},
        ],
    }


def test_a_config_json_is_enough_and_nothing_else_changes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    state, verbosity, has_bars = torch.get_rng_state(), logging.get_verbosity(), logging.is_progress_bar_enabled()
    result = check_model(tmp_path, megatron=False)
    assert outcomes(result) == dict.fromkeys(THERE_AND_BACK, "passed") | {"Megatron": "not run", "export": "not run"}
    assert result.passed
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert torch.equal(torch.get_rng_state(), state)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (verbosity, has_bars)


def test_without_megatron_its_rows_are_not_run(monkeypatch):
    without(monkeypatch, "megatron")
    result = check_model(QWEN3)
    assert result.passed
    assert result.rows[-1] == Row("export", None, "megatron-core is not installed")


def test_without_transformers_it_says_what_to_install(monkeypatch):
    without(monkeypatch, "transformers")
    with pytest.raises(CheckError, match=r"run: .* install .*'einops[<>].*'megatron-core[<>].*'transformers[<>]"):
        check_model(QWEN3)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model_type": "gpt2"}, UnsupportedModelError, "model_type 'gpt2'"),
        ({"hidden_size": None}, HfConfigError, "hidden_size is null"),
        ({"rms_norm_eps": None}, CheckError, "transformers cannot build a tiny qwen3 model"),
    ],
)
def test_a_config_that_no_model_can_be_made_of_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        check_model(QWEN3 | changes, megatron=False)


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


def test_a_checkpoint_that_cannot_be_written_fails_and_the_rest_is_not_run(monkeypatch):
    def fail(*_, **__):
        raise ValueError("broken table")

    monkeypatch.setattr(WeightMap, "from_hf", fail)
    result = check_model(QWEN3)
    assert not result.passed
    assert result.rows[0].detail == "ValueError: broken table"
    assert [row.outcome for row in result.rows] == ["failed", "failed", "not run", "not run", "not run"]


def test_a_process_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(proofs, "TIME_LIMIT_S", 0.2)
    result = check_model(QWEN3)
    assert result.rows[-2] == Row("Megatron", False, "Megatron's process took more than 0.2 seconds")
    assert result.rows[-1].passed is None


def test_a_process_that_fails_is_quoted(monkeypatch):
    monkeypatch.setattr(proofs, "_MEGATRON", "slime_convert.check.not_there")
    (row,) = (row for row in check_model(QWEN3).rows if row.name == "Megatron")
    assert not row.passed
    assert "ended with code 1" in row.detail
    assert "not_there" in row.detail
