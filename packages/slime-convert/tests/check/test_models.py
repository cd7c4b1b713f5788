import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from transformers.utils import logging

from slime_convert.check import check_model
from slime_convert.errors import CheckError, HfConfigError, UnsupportedModelError
from support.shapes import QWEN3_CONFIG as QWEN3

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


def test_a_config_json_is_enough_and_nothing_else_changes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    state, verbosity, has_bars = torch.get_rng_state(), logging.get_verbosity(), logging.is_progress_bar_enabled()
    result = check_model(tmp_path, megatron=False)
    assert outcomes(result) == dict.fromkeys(THERE_AND_BACK, "passed") | {"Megatron": "not run", "export": "not run"}
    assert result.passed
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert torch.equal(torch.get_rng_state(), state)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (verbosity, has_bars)


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
