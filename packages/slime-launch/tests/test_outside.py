"""Commands outside the checkout: no engine, no cache, and nothing of the working folder is run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).parent / "slime-launch"
SIZES = ["--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--colocate"]


@pytest.fixture
def own(workspace, tokenizer, tmp_path_factory):
    """A directory with prompts and what describes a model, without weights."""
    directory = tmp_path_factory.mktemp("own")
    (workspace / "train.jsonl").rename(directory / "train.jsonl")
    (workspace / "hf").rename(directory / "hf")
    (directory / "hf" / "model.safetensors").unlink()
    return directory


@pytest.fixture
def launch(own):
    """Runs a command there with a clean environment; gives exit code, standard output and standard error."""

    def run(*words, cwd=own, **more):
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(own), "HF_HUB_OFFLINE": "1", **more}
        done = subprocess.run(
            [COMMAND, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        return done.returncode, done.stdout, done.stderr

    return run


def plan(launch, *words, model="hf", data=("--prompt-data", "train.jsonl"), **more):
    code, out, err = launch("plan", "--json", "--hf-checkpoint", model, *data, *SIZES, *words, **more)
    assert out, err
    return code, json.loads(out), err


def test_a_config_and_a_tokenizer_are_enough_and_what_is_not_checked_is_said_once(launch, own):
    flags = ["--sglang-mem-fraction-static", "0.5", "--sglang-an-invented-one", "3"]
    code, found, err = plan(launch, *flags)
    assert (code, found["problems"], err) == (0, [], "")
    assert found["prompt"]["tokens"] == 4
    assert [line for line in found["notices"] if "SGLang is not installed" in line] == [
        "SGLang is not installed on this machine, so these flags are not checked: --sglang-mem-fraction-static, "
        "--sglang-an-invented-one; to start here, name the Python that has it with --sglang-python"
    ]
    assert "the weights of hf are not downloaded yet" in found["notices"]
    assert "--load is not given, so the run begins with --hf-checkpoint hf" in found["notices"]
    assert found["checkpoints"] == {"policy": "hf"}


def test_a_plan_for_another_machine_takes_its_interpreter_and_one_for_this_machine_asks_for_it(launch):
    words = ["--sglang-python", "/nonexistent/engines/python", "--sglang-log-level", "info"]
    code, found, _ = plan(launch, "--device", "h100", *words)
    assert (code, found["problems"]) == (0, [])
    assert (
        "SGLang is not installed on this machine, so these flags are not checked: --sglang-log-level"
        in found["notices"]
    )
    code, found, err = plan(launch, *words)
    assert code == 2 and err.count("--sglang-python /nonexistent/engines/python is not an executable file") == 1


@pytest.mark.parametrize("name", ["Qwen/Qwen3-4B", "Qwen3-4B", "qwen3-4B"])
def test_a_published_name_is_planned_from_its_config(launch, name):
    code, found, err = plan(launch, "--device", "h100", "--load", name, model=name)
    assert (code, found["problems"]) == (0, []), err
    assert found["model"]["layers"] == 36 and found["model"]["parameters"] == 4_022_468_096
    assert [line for line in found["notices"] if name in line] == [
        f"{name} is not on this machine: the plan is made from its published config; tokenizer, prompts and weights "
        "are not checked"
    ]
    assert found["prompt"] is None and found["rows"]


def test_a_name_that_nobody_published_is_refused(launch):
    code, found, _ = plan(launch, "--device", "h100", model="Qwen/Qwen3-5B")
    assert code == 2 and any("--hf-checkpoint Qwen/Qwen3-5B is not a directory" in line for line in found["problems"])


def test_rows_without_a_tokenizer_or_weights_are_planned_too(launch, own):
    (own / "train.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}) + "\n"
    )
    data = ("--prompt-data", "train.jsonl", "--loss-type", "sft_loss")
    words = ["--device", "h100", "--hf-checkpoint", "Qwen/Qwen3-0.6B", *data, "--num-rollout", "1"]
    code, out, err = launch("plan", "--json", *words, "--rollout-batch-size", "1", "--rollout-max-context-len", "1024")
    assert code == 0, err
    assert json.loads(out)["samples"] == []


def test_neither_engines_nor_modules_of_the_working_folder_are_run(launch, own):
    inner = own / "a" / "b"
    inner.mkdir(parents=True)
    ran = own / "ran"
    for folder in (own, inner):
        python = folder / ".venv-engine" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\necho {python} >> {ran}\nexit 0\n")
        python.chmod(0o755)
    for name in ("importlib", "json", "argparse", "pickle", "torch", "ray", "sglang", "logging"):
        (inner / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write('{name}\\n')\n")
    for path in ("hf", "train.jsonl"):
        (inner / path).symlink_to(own / path)
    launch("doctor", cwd=inner)
    code, _, err = launch("plan", "--hf-checkpoint", "hf", "--prompt-data", "train.jsonl", *SIZES, cwd=inner)
    assert code == 0, err
    launch("migrate", "--", "python", "train.py", "--sglang-log-level", "info", cwd=inner)
    assert not ran.exists(), ran.read_text()
