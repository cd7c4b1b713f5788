"""A model's name on the Hub is a directory before anything else looks at it."""

from __future__ import annotations

import json

import pytest
from huggingface_hub import constants

from slime_launch import train
from slime_launch.cli import main
from slime_launch.errors import PreflightError, Problems
from slime_launch.flags import parse_train
from slime_launch.names import local_model, with_paths
from slime_rollout.engine.python import find_python

NAME, OTHER = "owner/tiny-model", "owner/other-model"


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Puts a model into a cache of the Hub, on a machine without a network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return lambda name: put(tmp_path / "hub" / f"models--{name.replace('/', '--')}")


@pytest.fixture
def snapshot(cached):
    return cached(NAME)


def put(model):
    snapshot = model / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model-1.safetensors").write_bytes(b"")
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    return snapshot


def resolved(words, problem=""):
    """The settings of a command with paths for names; what is wrong has a text in it, if one is given."""
    found = Problems()
    settings = with_paths(parse_train(words), found)
    assert bool(found.lines) == bool(problem) and problem in "\n".join(found.lines)
    return settings


def test_a_model_in_the_cache_needs_no_network(snapshot, flags, to_words):
    assert local_model(NAME) == str(snapshot)
    settings = resolved(to_words(flags | {"--hf-checkpoint": NAME, "--load": NAME}))
    assert settings.rollout.data.hf_checkpoint == settings.megatron.load == str(snapshot)
    assert settings.engine.sglang_python == find_python(None)


@pytest.mark.parametrize("flag", ["--load", "--ref-load", "--critic-load", "--opd-teacher-load"])
def test_a_checkpoint_may_be_another_model_than_the_engines(snapshot, cached, flags, to_words, flag):
    key, other = flag[2:].replace("-", "_"), cached(OTHER)
    needs = {
        "--critic-load": {"--advantage-estimator": "ppo"},
        "--opd-teacher-load": {"--use-opd": None, "--opd-type": "megatron"},
    }
    flags |= needs.get(flag, {})
    settings = resolved(to_words(flags | {"--hf-checkpoint": NAME, flag: OTHER}))
    assert settings.rollout.data.hf_checkpoint == str(snapshot)
    assert getattr(settings.megatron, key) == str(other)
    assert getattr(resolved(to_words(flags | {flag: OTHER})).megatron, key) == str(other)  # the engines' is a directory


def test_what_is_missing_is_named_by_its_flag_and_the_others_are_found(snapshot, flags, to_words):
    problem = f"--ref-load {OTHER} is not a directory, is not complete in the Hub's cache"
    settings = resolved(to_words(flags | {"--hf-checkpoint": NAME, "--load": NAME, "--ref-load": OTHER}), problem)
    assert settings.megatron.ref_load == OTHER
    assert settings.rollout.data.hf_checkpoint == settings.megatron.load == str(snapshot)


PUBLISHED = "did you mean qwen3-30B-A3B? A plan takes that published name"


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Qwen3-30B-A3", f"is not a directory; {PUBLISHED}, and a run a directory or a name on the Hub"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", f"where there is a network; {PUBLISHED}"),
        ("owner/other", "or run `hf download owner/other` where there is a network"),
    ],
)
@pytest.mark.parametrize("flag", ["--hf-checkpoint", "--load", "--ref-load", "--critic-load", "--opd-teacher-load"])
def test_a_model_that_is_not_there_is_one_error_that_names_its_flag_and_the_nearest_published_one(
    snapshot, flags, to_words, capsys, monkeypatch, command, name, said, flag
):
    needs = {
        "--critic-load": {"--advantage-estimator": "ppo"},
        "--opd-teacher-load": {"--use-opd": None, "--opd-type": "megatron"},
    }
    monkeypatch.setattr(train, "supervise", None)
    monkeypatch.setenv("RAY_ADDRESS", "none")  # or a process is started while the command is checked
    assert main([command, *to_words(flags | needs.get(flag, {}) | {flag: name})]) == 2
    lines = [line.removeprefix("slime-launch: ") for line in capsys.readouterr().err.splitlines()]
    [line] = [line for line in lines if name in line]
    assert line.startswith(f"{flag} {name} is not a directory") and line.endswith(said)


def test_a_run_with_a_published_name_is_told_that_plans_alone_take_it(flags, to_words):
    resolved(to_words(flags | {"--hf-checkpoint": "Qwen3-4B"}), "a plan takes the published Qwen3-4B, and a run a")


def test_a_load_that_is_not_there_yet_may_look_like_a_name(snapshot, flags, to_words):
    """The run begins with --ref-load then, and says so."""
    settings = resolved(to_words(flags | {"--load": OTHER, "--ref-load": NAME}))
    assert (settings.megatron.load, settings.megatron.ref_load) == (OTHER, str(snapshot))


def test_what_the_run_will_write_is_no_name(snapshot, flags, to_words):
    own = {"--load": "runs/a", "--save": "./runs/a", "--ref-load": NAME, "--critic-load": "runs/b"}
    settings = resolved(to_words(flags | own | {"--critic-save": "runs/b", "--advantage-estimator": "ppo"}))
    assert (settings.megatron.load, settings.megatron.critic_load) == ("runs/a", "runs/b")
    assert settings.megatron.ref_load == str(snapshot)


def test_nothing_is_looked_up_for_trainers_that_are_not_started(snapshot, flags, to_words):
    words = [*to_words({**flags, "--load": OTHER}), "--debug-rollout-only"]
    assert resolved(words).megatron.load == OTHER


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
