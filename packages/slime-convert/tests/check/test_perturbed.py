"""A field of a config that says something else gives another model, converted rightly, or is refused."""

from pathlib import Path

import pytest

from check.prediction import all_logits
from check.test_families import CONFIGS
from slime_convert.check import proofs
from slime_convert.check.tiny import build, quiet, tiny_config
from slime_convert.errors import ConvertError
from slime_convert.shape import ModelShape

ALWAYS = ("qwen3_moe",)
EVERY = [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.full) for name in CONFIGS]
NOT_OF_THE_MODEL = ("model_type", "torch_dtype", "dtype")


def others(key, value):
    """Other values of a field's kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        found = {value * 2, value + 1, max(value // 2, 0)} - {value}
        return sorted(other for other in found if key != "vocab_size" or other > value)  # the proofs' tokens are in it
    if isinstance(value, float):
        return [value * 2, value / 4] if value else [0.5]
    return [{"silu": "gelu", "gelu_pytorch_tanh": "silu"}.get(value, f"{value}2")] if isinstance(value, str) else []


def perturbed(config):
    """The config with another value in one field, for each field and value."""
    for key, value in config.items():
        for other in others(key, value) if key not in NOT_OF_THE_MODEL else ():
            yield f"{key}: {value!r} → {other!r}", config | {key: other}


def can_be_compared(config, directory):
    """Whether neither we nor transformers refuse a config or fail to compute with it, and its model says something."""
    try:
        ModelShape.from_hf_config(config)
        with quiet():
            all_logits(build(config, directory))
    except (ConvertError, AssertionError, RuntimeError, IndexError):
        return False
    return True


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", EVERY)
def test_another_value_in_any_field_is_refused_or_converts_as_transformers_reads_it(name, monkeypatch, tmp_path):
    monkeypatch.setattr(proofs, "_MEGATRON", "core_parts")
    monkeypatch.setattr(proofs, "what_core_lacks", lambda shape: "")
    monkeypatch.setattr(proofs, "expected_logits", all_logits)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    found = list(perturbed(tiny_config(CONFIGS[name])))
    kept = [one for number, one in enumerate(found) if can_be_compared(one[1], tmp_path / str(number))]
    assert len(kept) > 10
    (tmp_path / "proofs").mkdir()
    results = proofs.prove([config for _, config in kept], tmp_path / "proofs", megatron=True)
    wrong = {
        what: [(row.name, row.detail) for row in result.rows if row.outcome != "passed"]
        for (what, _), result in zip(kept, results, strict=True)
        if not result.passed
    }
    assert wrong == {}
