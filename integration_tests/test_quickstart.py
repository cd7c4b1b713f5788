"""The quick start on its real model: killed in the middle it goes on, and finished it does nothing twice."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from launching import run, started, tree, wait_for, wait_until_gone

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "quickstart"
STEPS = 3
GONE_SECONDS = 30.0
# The environments are made in the first call, from packages that may have to be downloaded.
CALL_SECONDS = 900.0


def _trained(output: Path) -> list[dict[str, Any]]:
    path = output / "seed-4" / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [row for line in lines if line.endswith("\n") and (row := json.loads(line))["kind"] == "train"]


@pytest.mark.full
@pytest.mark.real
@pytest.mark.timeout(3 * CALL_SECONDS)
def test_a_killed_quick_start_goes_on_and_a_finished_one_repeats_its_result(tmp_path: Path) -> None:
    output = tmp_path / "quick start"
    words = [str(SCRIPT), "--seed", "4", "--output-dir", str(output)]
    made = run([*words, "--steps", "0"], tmp_path / "made.txt", seconds=CALL_SECONDS)
    assert (
        "nothing is trained" in made and (output / "model" / "hf").is_dir() and not (output / "seed-4" / "run").exists()
    )

    command = [*words, "--steps", str(STEPS)]
    command += ["--", "--save-interval", "1", "--eval-interval", str(STEPS)]

    with started(command, tmp_path / "killed.txt") as process:
        wait_for(
            lambda: len(_trained(output)) >= 2,
            "the second step",
            process=process,
            log=tmp_path / "killed.txt",
            seconds=CALL_SECONDS,
        )
        family = tree(process)
        process.kill()
        process.wait(10)
    assert not (left := wait_until_gone(family, GONE_SECONDS)), left

    resumed = run(command, tmp_path / "resumed.txt", seconds=CALL_SECONDS)
    result = json.loads(resumed.splitlines()[-1].removeprefix("result: "))
    print("resumed:", resumed.splitlines()[-1])
    assert [row["rollout_id"] for row in _trained(output)] == list(range(STEPS))
    assert "GGUF → Hugging Face" not in resumed, "the model was converted a second time"
    assert result["steps"] == STEPS
    assert 0 < result["pass_rate_before"] < 1 and 0 < result["pass_rate_after"] < 1
    assert all(Path(result[name]).is_dir() for name in ("run_dir", "checkpoint_dir", "hf_dir"))
    assert result["prompt_template"].format(a=57, b=26).endswith("57 + 26 =")

    begun = time.monotonic()
    again = run(command, tmp_path / "again.txt", seconds=CALL_SECONDS)
    print(f"again: {time.monotonic() - begun:.1f} s")
    assert again.splitlines()[-1] == resumed.splitlines()[-1]
    assert "done already" in again and len(_trained(output)) == STEPS
