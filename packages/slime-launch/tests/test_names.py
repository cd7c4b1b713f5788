"""A model's name on the Hub is a directory before anything else looks at it."""

from __future__ import annotations

import json

import pytest
from huggingface_hub import constants

from slime_launch.errors import PreflightError
from slime_launch.flags import parse_train
from slime_launch.names import local_model, with_paths
from slime_rollout.engine.python import find_python

NAME = "owner/tiny-model"


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    """A model in a cache of the Hub, on a machine without a network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "hub" / "models--owner--tiny-model"
    snapshot = model / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model-1.safetensors").write_bytes(b"")
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    return snapshot


def test_a_model_in_the_cache_needs_no_network(snapshot, flags, to_words):
    assert local_model(NAME) == str(snapshot)
    settings = with_paths(parse_train(to_words(flags | {"--hf-checkpoint": NAME, "--load": NAME})))
    assert settings.rollout.data.hf_checkpoint == settings.megatron.load == str(snapshot)
    assert settings.engine.sglang_python == find_python(None)


def test_a_directory_is_itself(snapshot, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "tiny-model").mkdir(parents=True)
    assert local_model(NAME) == NAME
    assert local_model("/no/such/model") == "/no/such/model"


@pytest.mark.parametrize("missing", ["model-1.safetensors", "config.json"])
def test_what_is_not_whole_and_cannot_be_downloaded(snapshot, missing):
    (snapshot / missing).unlink()
    with pytest.raises(PreflightError, match=r"is not complete in the Hub's cache.*hf download owner/tiny-model"):
        local_model(NAME)


@pytest.mark.parametrize("content", ["", "{}", "[]"])
def test_an_index_that_was_cut_off(snapshot, content):
    (snapshot / "model.safetensors.index.json").write_text(content)
    with pytest.raises(PreflightError, match=r"is not complete in the Hub's cache"):
        local_model(NAME)


def test_a_model_that_is_not_there(snapshot):
    with pytest.raises(PreflightError, match="hf download owner/other"):
        local_model("owner/other")
