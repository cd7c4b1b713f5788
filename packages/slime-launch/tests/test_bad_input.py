"""Each mistake gets one clear line and exit code 2, and nothing is written."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import psutil
import pytest

from slime_launch.cli import main
from slime_rollout.engine.python import find_python
from slime_rollout.engine.sglang_flags import installed_flags

CLI = [sys.executable, "-m", "slime_launch.cli", "train"]


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()} | {
        str(path): b"" for path in directory.rglob("*") if path.is_dir()
    }


def processes_with(mark: str) -> list[psutil.Process]:
    """What was started with a value in its environment and still runs, wherever it hangs; this process left out."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("SLIME_TEST_MARK") == mark:
                found.append(process)
    return found


@pytest.fixture
def refused(workspace, to_words, monkeypatch, capfd):
    """Run a command that must be refused; gives its one line. It is not the first command with its SGLang."""
    installed_flags(find_python(None))
    monkeypatch.chdir(workspace)

    def run(flags: dict[str, str | None], *, in_process: bool = True) -> str:
        before, mark = snapshot(workspace), uuid.uuid4().hex
        monkeypatch.setenv("SLIME_TEST_MARK", mark)
        words = to_words(flags)
        code = main(["train", *words]) if in_process else subprocess.run([*CLI, *words], timeout=240).returncode
        out, err = capfd.readouterr()
        assert code == 2, (out, err)
        assert processes_with(mark) == []
        assert list(Path(tempfile.gettempdir()).glob(f"slime-ray-{os.getpid()}-*")) == []
        assert out == ""
        lines = err.strip().splitlines()
        assert len(lines) == 1, err
        assert lines[0].startswith("slime-launch: ")
        assert snapshot(workspace) == before
        return lines[0]

    return run


@pytest.mark.parametrize("in_process", [True, False])
def test_missing_data_file(refused, flags, workspace, in_process):
    flags["--prompt-data"] = str(workspace / "absent.jsonl")
    assert "absent.jsonl does not exist" in refused(flags, in_process=in_process)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{not json", "train.jsonl:3: invalid JSON"),
        (
            json.dumps({"prompt": 7.5, "label": "1"}),
            "train.jsonl:3: 'prompt' must be a string or a list of chat messages",
        ),
        (json.dumps({"prompt": "1 + 1 ="}), "train.jsonl:3: "),
    ],
    ids=["malformed line", "prompt of another type", "missing label"],
)
def test_bad_row(refused, flags, workspace, line, expected):
    path = workspace / "train.jsonl"
    rows = path.read_text().splitlines()
    rows[2] = line
    path.write_text("\n".join(rows) + "\n")
    assert expected in refused(flags)


def test_missing_label_names_the_field(refused, flags, workspace):
    flags["--label-key"] = "answer"
    message = refused(flags)
    assert "train.jsonl:1" in message
    assert "'answer'" in message


def test_held_out_data_is_read_too(refused, flags, workspace):
    flags["--eval-prompt-data"] = str(workspace / "absent-eval.jsonl")
    assert "absent-eval.jsonl does not exist" in refused(flags)


def test_the_file_of_held_out_sets_is_read_too(refused, flags, workspace):
    (workspace / "sets.yaml").write_text("eval: {datasets: {aime: {path: absent-eval.jsonl, temprature: 0}}}")
    flags["--eval-config"] = "sets.yaml"
    assert "sets.yaml: set aime: the key temprature is unknown; did you mean temperature?" in refused(flags)
    (workspace / "sets.yaml").write_text("eval: {datasets: {aime: {path: absent-eval.jsonl}}}")
    assert "held-out set aime: the prompt file absent-eval.jsonl does not exist" in refused(flags)


def test_unknown_flag(refused, flags):
    flags["--num-rolout"] = "3"
    assert "unknown flag --num-rolout; did you mean --num-rollout?" in refused(flags)


def test_all_mistakes_of_a_command_at_once(flags, workspace, to_words):
    """As `plan` reports them: what cannot be read does not hide what cannot work."""
    flags |= {"--num-rolout": "3", "--lr": "abc", "--load": "/none", "--global-batch-size": "7"}
    done = subprocess.run([*CLI, *to_words(flags)], capture_output=True, text=True, timeout=240, cwd=workspace)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2 and len(lines) == 4, lines
    for text in ("unknown flag --num-rolout", "--lr: 'abc'", "/none does not exist", "global_batch_size (7)"):
        assert sum(text in line for line in lines) == 1, lines


def test_unknown_sglang_flag(refused, flags):
    flags["--sglang-mem-fraction"] = "0.5"
    assert "unknown flag --sglang-mem-fraction; did you mean --sglang-mem-fraction-static?" in refused(flags)


def test_wrong_type(refused, flags):
    flags["--num-rollout"] = "many"
    assert "--num-rollout: 'many' is not a whole number" in refused(flags)


def test_batch_identity(refused, flags):
    flags["--global-batch-size"] = "4"
    flags["--num-steps-per-rollout"] = "1"
    assert (
        "rollout_batch_size (4) × n_samples_per_prompt (2) = 8 must equal global_batch_size (4) × "
        "num_steps_per_rollout (1); set --global-batch-size 8 or --num-steps-per-rollout 2"
    ) in refused(flags)


@pytest.mark.parametrize("flag", ["--load", "--ref-load", "--hf-checkpoint"])
def test_a_checkpoint_directory_that_is_none(refused, flags, workspace, flag):
    empty = workspace / "empty"
    empty.mkdir()
    flags[flag] = str(empty)
    message = refused(flags)
    assert str(empty) in message


@pytest.mark.parametrize("flag", ["--load", "--ref-load", "--hf-checkpoint"])
def test_a_checkpoint_directory_that_is_not_there(refused, flags, workspace, flag):
    flags[flag] = str(workspace / "nowhere")
    assert str(workspace / "nowhere") in refused(flags)


def test_all_shape_mismatches_in_one_message(refused, flags):
    flags |= {"--num-layers": "3", "--hidden-size": "128", "--num-attention-heads": "4", "--add-qkv-bias": None}
    message = refused(flags)
    for part in ("--num-layers 3", "--hidden-size 128", "--add-qkv-bias"):
        assert part in message
    assert "--num-attention-heads" not in message


def test_port_in_use(refused, flags):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags["--sglang-router-port"] = str(port)
        message = refused(flags)
    assert f"--sglang-router-port {port} cannot be used on 127.0.0.1 (Address already in use)" in message


@pytest.mark.parametrize("flag", ["--save", "--output-dir"])
def test_output_that_cannot_be_written(refused, flags, workspace, flag):
    flags[flag] = str(workspace / "train.jsonl" / "below-a-file")
    message = refused(flags)
    assert f"{flag} " in message
    assert "can't be written" in message


def test_no_weights(refused, flags, workspace):
    del flags["--load"]
    (workspace / "hf" / "model.safetensors").unlink()
    assert "has no *.safetensors; give a Hugging Face model directory" in refused(flags)


def test_no_room_for_engines(refused, flags):
    del flags["--colocate"]
    assert "give --rollout-num-gpus N, or --colocate" in refused(flags)


def test_micro_batch_that_does_not_divide(refused, flags):
    flags["--micro-batch-size"] = "3"
    assert "--micro-batch-size 3" in refused(flags)


def test_tensor_parallel_ranks_that_do_not_divide_the_model(refused, flags):
    flags |= {"--tensor-model-parallel-size": "4", "--actor-num-gpus-per-node": "4"}
    assert "--tensor-model-parallel-size 4 does not divide the model's num_query_groups 2; allowed: 1, 2" in refused(
        flags
    )


def test_an_algorithm_without_its_parts(refused, flags, workspace):
    line = refused({**flags, "--critic-lr": "1e-5"})
    assert "--critic-lr 1e-05 has no effect with --advantage-estimator grpo" in line
    own = {"--custom-advantage-function-path": str(workspace / "none.py:fn")}
    assert "none.py:fn: " in (line := refused(flags | own))
    assert "does not load: FileNotFoundError" in line
    assert "give one of them" in refused({**flags, "--use-tis": None, "--use-mis": None})


def test_save_that_holds_another_run(refused, flags, workspace):
    (workspace / "save").mkdir()
    (workspace / "save" / "manifest.json").write_text(
        json.dumps(
            {
                "format_version": 2,
                "iteration": 1,
                "weight_version": 1,
                "checkpoint": None,
                "source_state": {},
                "flags": {"lr": 3e-4},
                "output_dir": "x",
                "load": "x",
                "ref_load": "x",
            }
        )
    )
    message = refused(flags)
    assert "started with other flags" in message
    assert "--lr 0.0003 → 1e-06" in message


def test_save_whose_manifest_is_broken(refused, flags, workspace):
    (workspace / "save").mkdir()
    (workspace / "save" / "manifest.json").write_text("{")
    assert "manifest.json is not a valid manifest" in refused(flags)


def test_a_value_that_sglang_does_not_take(refused, flags):
    flags["--sglang-mem-fraction-static"] = "half"
    assert "--sglang-mem-fraction-static half is not a number" in refused(flags)


def test_no_sglang(refused, flags, monkeypatch):
    monkeypatch.delenv("PYTHONPATH")
    assert "SGLang is not installed in" in refused(flags)


def test_unknown_command():
    done = subprocess.run([*CLI[:-1], "tarin"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert done.stderr.strip() == "slime-launch: unknown command tarin; did you mean train?"


@pytest.mark.parametrize(
    ("flag", "path", "expected"),
    [
        ("--custom-generate-function-path", "own.plain", "own.plain is not async; write `async def`"),
        ("--custom-rm-path", "own.py:plain", "own.py:plain takes (); it is called with 2 arguments, (args, sample)"),
    ],
)
def test_a_hook_that_cannot_be_used(refused, flags, workspace, flag, path, expected):
    (workspace / "own.py").write_text("def plain(): pass\n")
    flags[flag] = path
    if flag == "--custom-rm-path":
        flags.pop("--rm-type", None)
    assert expected in refused(flags)
