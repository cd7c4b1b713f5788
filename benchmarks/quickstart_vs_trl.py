"""The quick start's step through our loop and through TRL's `GRPOTrainer`, alternating in one run.

Both get the same model, problems, group size, response length, precision (bf16 over fp32 master weights), KL term (k3),
learning rate and clipping, and both train on every sample. Each start's first step warms up and is left out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from _flops import forward_flops, training_flops
from _quick_start import SEED, prepare
from _records import Record
from quickstart import ENGINE_PYTHON, MODEL_ARGS, ROOT
from quickstart_parts import Places, command_script, replace_flags, train_flags

REQUIREMENTS = ROOT / "benchmarks" / "requirements-trl.txt"
TRL_ENV = ROOT / ".venv-trl"
PROMPTS, GROUP, RESPONSE_TOKENS = 16, 8, 6
TRL_MICRO_BATCH = 32  # TRL pads and does not share prompts: 128 samples at once need more memory and are not faster
START_LIMIT_SECONDS = 1800.0
GOAL = 6.0
PREFILL = re.compile(r"Prefill batch.*?#new-token: (\d+)")


@dataclass(frozen=True)
class Round:
    """One start of one side: seconds by phase of each step that counts, and operations per step."""

    steps: list[dict[str, float]]
    flops: float | None


def main(out: Path, *, quick: bool) -> list[Record]:
    """Run both sides in turn.

    Args:
        out: Directory for logs and results.
        quick: One round of two steps, a quarter of the prompts each, instead of two rounds of five.
    """
    rounds, steps, prompts = (1, 2, PROMPTS // 4) if quick else (2, 5, PROMPTS)
    places = prepare()
    make_trl_environment()
    ours, trl = [], []
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}: ours", flush=True)
        ours.append(run_ours(places, out / f"ours-{number}", steps, prompts))
        print(f"round {number + 1} of {rounds}: TRL", flush=True)
        trl.append(run_trl(places, out / f"trl-{number}", steps, prompts, count_flops=number == rounds - 1))
    return summarize(ours, trl, prompts * GROUP)


def run_ours(places: Places, out: Path, steps: int, prompts: int) -> Round:
    """`slime-launch train` with the quick start's flags, without evaluation and checkpoints."""
    out.mkdir(parents=True)
    flags = train_flags(places, engine_python=ENGINE_PYTHON, seed=SEED, steps=steps)
    for name in ("--save", "--save-interval", "--eval-prompt-data", "--eval-interval", "--eval-temperature"):
        del flags[name]
    words = ["--output-dir", str(out / "run"), "--kl-loss-type", "k3"]
    samples = str(prompts * GROUP)
    words += ["--rollout-batch-size", str(prompts), "--global-batch-size", samples, "--micro-batch-size", samples]
    flags = replace_flags(flags, words)
    script = out / "command.sh"
    launcher = ROOT / ".venv" / "bin" / "slime-launch"
    script.write_text(command_script(flags, model_args=MODEL_ARGS, launcher=launcher, root=ROOT))
    run(["bash", str(script)], out / "log.txt")
    rows = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    rollouts = [row for row in rows if row["kind"] == "rollout"]
    prefilled = sum(int(n) for log in (out / "run" / "logs").glob("engine*") for n in PREFILL.findall(log.read_text()))
    config = json.loads((places.hf / "config.json").read_text())
    return Round([our_seconds(row) for row in rollouts[1:]], our_flops(config, rollouts, prefilled, prompts))


def our_seconds(row: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase of one rollout row of metrics.jsonl."""
    training = row["perf/forward_backward_time"] + row["perf/optimizer_time"]
    known = {
        "generate": row["perf/rollout_time"],
        "reference": row["perf/ref_log_probs_time"],
        "train": training,
        "send weights": row["perf/update_weights_time"],
    }
    return known | {"other": row["perf/step_time"] - sum(known.values()), "step": row["perf/step_time"]}


def our_flops(
    config: Mapping[str, Any], rollouts: Sequence[Mapping[str, float]], prefilled: float, prompts: int
) -> float:
    """Operations per step: tokens that the engine and the trainer say they computed, times the formula.

    Args:
        config: The model's config.json.
        rollouts: The rollout rows of metrics.jsonl.
        prefilled: Prompt tokens that the engine computed in the whole run, after its cache.
        prompts: Of a step.
    """
    total = 0.0
    for row in rollouts:
        responses = row["rollout/response_tokens"]
        context = row["perf/forward_backward_tokens"] / prompts / 2
        decoded = responses - prompts * GROUP  # the first token of a response comes from the prompt's pass
        total += forward_flops(config, tokens=decoded, context=2 * context, logits=responses)
        total += forward_flops(config, tokens=row["perf/ref_log_probs_tokens"], context=context, logits=responses)
        total += training_flops(config, tokens=row["perf/forward_backward_tokens"], context=context, logits=responses)
    total += forward_flops(config, tokens=prefilled, context=prefilled / len(rollouts) / prompts / 2, logits=0)
    return total / len(rollouts)


def run_trl(places: Places, out: Path, steps: int, prompts: int, *, count_flops: bool) -> Round:
    """`GRPOTrainer` in its own environment; one more step when its operations are to be counted."""
    out.mkdir(parents=True)
    flags = train_flags(places, engine_python=ENGINE_PYTHON, seed=SEED, steps=steps)
    settings = {
        "model": str(places.hf),
        "data": str(places.train_data),
        "steps": steps + count_flops,
        "prompts_per_step": prompts,
        "group_size": GROUP,
        "response_tokens": RESPONSE_TOKENS,
        "micro_batch_size": TRL_MICRO_BATCH,
        "lr": float(flags["--lr"][0]),
        "kl_coef": 0.001,
        "clip_grad": 1.0,
        "bf16": True,
        "seed": SEED,
        "count_flops": count_flops,
    }
    (out / "settings.json").write_text(json.dumps(settings))
    script = ROOT / "benchmarks" / "_trl_grpo.py"
    python = TRL_ENV / "bin" / "python"
    run([str(python), "-u", str(script), str(out / "settings.json"), str(out / "result.json")], out / "log.txt")
    result = json.loads((out / "result.json").read_text())
    return Round([step["seconds"] for step in result["steps"][1:steps]], result["flops"])


def summarize(ours: Sequence[Round], trl: Sequence[Round], samples: int) -> list[Record]:
    """Medians over the steps that count, each of so many samples, and the ratio of both sides."""
    records, rates = [], []
    for case, rounds in (("ours", ours), ("trl", trl)):
        steps = [step for each in rounds for step in each.steps]
        seconds = {phase: median(step.get(phase, 0.0) for step in steps) for phase in steps[0]}
        rates.append(samples / seconds["step"])
        records += [Record(case, phase, value, "s", more_is_better=False) for phase, value in seconds.items()]
        records.append(Record(case, "rate", rates[-1], "samples/s", more_is_better=True))
        flops = [each.flops for each in rounds if each.flops is not None]
        records.append(Record(case, "computed", median(flops) / 1e12, "TFLOP/step"))
    records.append(Record("ours / trl", "rate", rates[0] / rates[1], "x", more_is_better=True, goal=GOAL))
    return records


def make_trl_environment() -> None:
    """`.venv-trl`, unless it is there."""
    stamp = TRL_ENV / "installed.txt"
    if stamp.exists() and stamp.read_text() == REQUIREMENTS.read_text():
        return
    print("environment .venv-trl: TRL", flush=True)
    subprocess.run(["uv", "venv", "--quiet", "--clear", str(TRL_ENV)], check=True, cwd=ROOT)
    install = ["uv", "pip", "install", "--python", str(TRL_ENV), "--requirement", str(REQUIREMENTS)]
    subprocess.run(install, check=True, cwd=ROOT)
    stamp.write_text(REQUIREMENTS.read_text())


def run(command: Sequence[str], log: Path) -> None:
    """Run one side to its end, within a limit; its output goes to a file."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, timeout=START_LIMIT_SECONDS, env=environment, cwd=ROOT
        )
    if done.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"{command[0]} ended with exit code {done.returncode}:\n{tail}")
