"""The settings that a run writes down, and where each comes from."""

import dataclasses
import json
import platform
import sys

import pytest
import torch

import slime_launch.megatron_flags
from slime_launch.flags import parse_train
from slime_launch.preflight import Checked
from slime_launch.redact import HIDDEN
from slime_launch.resolved import FILE_NAME, installed, packages, write_resolved
from slime_launch.resume import StartWeights
from slime_launch.train import with_facts
from support.config_files import as_file


def a_checked(settings):
    return Checked(
        settings=settings, shape=None, manifest=None, weights=StartWeights(load="l", ref_load="r"), overrides={},
        topology=None, num_engines=1,
    )  # fmt: skip


def test_what_is_written_has_values_origins_and_no_secrets(flags, to_words, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef-secret")
    monkeypatch.setenv("SLIME_TEST_VALUE", "here 0123456789abcdef-secret there")
    file = as_file({"--lr": "2e-5"}, tmp_path / "run.yaml")
    words = [*to_words({name: value for name, value in flags.items() if name != "--global-batch-size"})]
    settings = parse_train([*words, "--config", file, "--rm-url", "http://me:hunter22@h:1/x", "--rm-type", "remote_rm"])
    checked = a_checked(settings)
    write_resolved(checked, tmp_path)
    text = (tmp_path / FILE_NAME).read_text()
    write_resolved(dataclasses.replace(checked, packages=packages(settings.kind, settings.engine)), tmp_path)
    assert (tmp_path / FILE_NAME).read_text() == text
    text = (tmp_path / FILE_NAME).read_text()
    rows = json.loads(text)["settings"]
    assert rows["lr"] == {"value": 2e-5, "origin": "config file"}
    assert rows["num_rollout"] == {"value": 2, "origin": "command line"}
    assert rows["global_batch_size"] == {"value": 8, "origin": "derived"}
    assert rows["seed"]["origin"] == "default"
    assert rows["rm_url"]["value"] == f"http://{HIDDEN}@h:1/x"
    assert "abcdef-secret" not in text
    assert "hunter22" not in text
    assert json.loads(text)["packages"] == installed(sys.executable)


def test_what_is_written_is_the_environment_of_the_command_and_not_what_ray_adds(
    flags, to_words, tmp_path, monkeypatch
):
    for name in ("RAY_AUTH_MODE", "SLIME_TEST_VALUE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLIME_TEST_VALUE", "1")
    settings = parse_train([*to_words(flags)])
    monkeypatch.setattr(slime_launch.megatron_flags, "argument_notes", lambda *_: [])  # which needs a model
    checked = with_facts(a_checked(settings))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    write_resolved(checked, tmp_path)
    environment = json.loads((tmp_path / FILE_NAME).read_text())["environment"]
    assert environment["SLIME_TEST_VALUE"] == "1" and "RAY_AUTH_MODE" not in environment


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--no-colocate", "--rollout-num-gpus", "1"], (False, False, True)),
        (["--colocate"], (True, True, True)),
        (["--colocate", "--no-offload-train", "--no-rollout-skip-special-tokens"], (False, True, False)),
        (["--no-colocate", "--rollout-num-gpus", "1", "--offload"], (True, True, True)),
    ],
)
def test_switches_that_are_on_by_default_are_written_as_they_are_in_effect(words, expected, flags, to_words, tmp_path):
    write_resolved(a_checked(parse_train([*to_words(flags), *words])), tmp_path)
    rows = json.loads((tmp_path / FILE_NAME).read_text())["settings"]
    names = ("offload_train", "offload_rollout", "rollout_skip_special_tokens")
    assert tuple(rows[name]["value"] for name in names) == expected


def test_versions_of_an_interpreter_that_is_here(tmp_path):
    found = installed(sys.executable)
    assert found["python"] == platform.python_version() and found["torch"] == torch.__version__
    assert installed(str(tmp_path / "python")) is None and installed("/bin/false") is None
