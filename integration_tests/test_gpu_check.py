"""`scripts/gpu-check`: what a CPU can show of it, its table's verdicts, and what it says without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")


def gpu_check(*words: str, timeout: float = 250) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [str(ROOT / "scripts" / "gpu-check"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


@no_gpu
def test_without_a_gpu_nothing_is_run() -> None:
    done = gpu_check()
    assert (done.returncode, done.stdout) == (2, "")
    assert "no GPU here, so nothing was run" in done.stderr


def results(path: Path) -> dict[tuple[str, str], str]:
    written = json.loads(path.read_text())
    assert written["device"] == "cpu" and written["machine"]["versions"]["torch"]
    return {(row["check"], row["case"]): row["result"] for row in written["rows"]}


@pytest.mark.full
def test_a_part_of_it(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    done = gpu_check("--device", "cpu", "--ranks", "1", "--only", "sharing", "offload", "push", "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    found = results(output)
    assert (
        found["sharing", "qwen3, local, fp32: gradient norm"]
        == found["sharing", "deepseek, local, bf16: logits"]
        == "ok"
    )
    assert found["offload", "sleep and wake"] == found["push", "shared memory"] == "ok"
    assert found["sharing", "deepseek, Transformer Engine, bf16: logits"] == "not run: needs a GPU"
    assert found["offload", "optimizer on the host = on the GPU"] == "not run: needs a GPU"
    assert "transformer-engine missing" in done.stdout and "9 as expected, 0 not, 4 not run" in done.stdout


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_all_of_it(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    done = gpu_check("--device", "cpu", "--ranks", "2", "--output", str(output), timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    found = results(output)
    print(done.stdout)
    layouts = {case: result for (check, case), result in found.items() if check == "layouts"}
    assert sum(result == "ok" for result in layouts.values()) == 68
    assert set(layouts.values()) == {"ok", "not run: needs 4 ranks", "not run: needs a GPU"}
    speed = found["speed", "tiny, local"], found["speed", "tiny with experts, local"]
    assert {*speed, found["determinism", "local, bf16: two runs"]} == {"ok"}


def test_what_is_off_is_a_mismatch_and_ends_no_check() -> None:
    from gpu_check.machine import Machine, NotRunError, Verdict
    from gpu_check.processes import CheckError

    def raising(error: Exception) -> Callable[[], Verdict]:
        def compute() -> Verdict:
            raise error

        return compute

    def cases(machine: object) -> Iterator[tuple[str, Callable[[], Verdict]]]:
        yield "far", lambda: ("2", "1", False)
        yield "broken", raising(CheckError("rank 0 died"))
        yield "elsewhere", raising(NotRunError("needs 2 ranks"))
        yield "near", lambda: ("1", "1", True)

    rows = list(Machine.guarded(Machine.__new__(Machine), "one", cases))
    assert [row.result for row in rows] == ["MISMATCH", "MISMATCH", "not run: needs 2 ranks", "ok"]
    assert rows[1].value == "rank 0 died"


@pytest.mark.parametrize(
    ("name", "whole"), [("smollm2-135M", True), ("qwen2.5-0.5B", True), ("qwen2.5-7B", False), ("qwen3-30B-A3B", False)]
)
def test_as_many_layers_are_measured_as_a_gpu_can_train(name: str, whole: bool) -> None:
    from gpu_check.speed import fitting

    label, shape = fitting(name, 80 * 2**30)
    assert (label == name) == whole
    assert shape.num_layers >= 3 and (whole or shape.num_layers < 28)
