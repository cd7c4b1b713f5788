import importlib.util

from slime_convert.check import Proof, check_model, proofs
from slime_convert.mapping import WeightMap
from support.shapes import QWEN3_CONFIG as QWEN3


def without(monkeypatch, package):
    """As if a package were not installed."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))


def test_without_megatron_its_rows_are_not_run(monkeypatch):
    without(monkeypatch, "megatron")
    result = check_model(QWEN3)
    assert result.passed
    assert result.rows[-1] == Proof("export", None, "megatron-core is not installed")


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
    assert result.rows[-2] == Proof("Megatron", False, "Megatron's process took more than 0.2 seconds")
    assert result.rows[-1].passed is None


def test_a_process_that_fails_is_quoted(monkeypatch):
    monkeypatch.setattr(proofs, "_MEGATRON", "slime_convert.check.not_there")
    (row,) = (row for row in check_model(QWEN3).rows if row.name == "Megatron")
    assert not row.passed
    assert "ended with code 1" in row.detail
    assert "not_there" in row.detail
