"""The TRL half of `quickstart_vs_trl`: a few GRPO steps with `GRPOTrainer`. Runs in `.venv-trl`, by itself.

    .venv-trl/bin/python benchmarks/_trl_grpo.py settings.json result.json

Settings: `model`, `data` (JSONL with `prompt` and `label`), `steps`, `prompts_per_step`, `group_size`,
`response_tokens`, `micro_batch_size`, `lr`, `kl_coef`, `clip_grad`, `bf16`, `seed`, `count_flops`.
Result: per step `seconds` by phase, `mean_reward` and `tokens` through the model by phase; with `count_flops` also the
floating-point operations of the last step as torch counts them. A counted step is slower, so its seconds mean nothing.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

INTEGER = re.compile(r"-?\d+")


def first_integer(completions: list[str], label: list[str], **_: Any) -> list[float]:
    """1 if the first integer of a completion is its label."""
    found = [INTEGER.search(text) for text in completions]
    return [float(match is not None and int(match[0]) == int(want)) for match, want in zip(found, label, strict=True)]


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
    """`GRPOTrainer` that notes where a step's time goes and how many tokens pass through the model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.phases: dict[str, float] = defaultdict(float)
        self.tokens: dict[str, int] = defaultdict(int)
        self._phase = "train"
        for model in (self.model, self.ref_model):
            if model is not None:
                model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.tokens[self._phase] += (kwargs["input_ids"] if "input_ids" in kwargs else args[0]).numel()

    def _timed(self, phase: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        outer, self._phase, start = self._phase, phase, time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds = time.perf_counter() - start
            self.phases[phase] += seconds
            self.phases[outer] -= seconds
            self._phase = outer

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed("generate", super()._generate_single_turn, *args, **kwargs)

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed("reference", super()._generate_and_score_completions, *args, **kwargs)


class StepRecorder(TrainerCallback):  # type: ignore[misc]
    """One record per optimizer step."""

    def __init__(self, count_flops: bool) -> None:
        self.steps: list[dict[str, Any]] = []
        self.flops: int | None = None
        self._count_flops = count_flops
        self._counter: FlopCounterMode | None = None
        self._start = 0.0
        self.trainer: TimedTrainer | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reset the clocks. The first micro-batch's data, generation included, is prepared after this."""
        assert self.trainer is not None
        self.trainer.phases.clear()
        self.trainer.tokens.clear()
        if self._count_flops and state.global_step == args.max_steps - 1:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()  # type: ignore[no-untyped-call]
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the step."""
        assert self.trainer is not None
        total = time.perf_counter() - self._start
        seconds = {"train": total + self.trainer.phases["train"]}
        seconds |= {name: value for name, value in self.trainer.phases.items() if name != "train"}
        self.steps.append({"seconds": seconds | {"step": total}, "tokens": dict(self.trainer.tokens)})
        if self._counter is not None:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.flops = self._counter.get_total_flops()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """Note the mean reward."""
        if "reward" in logs:
            self.steps[-1]["mean_reward"] = float(logs["reward"])


def make_trainer(settings: dict[str, Any], output_dir: str, recorder: StepRecorder) -> TimedTrainer:
    """A trainer with the settings that our own loop has."""
    batch = settings["prompts_per_step"] * settings["group_size"]
    config = GRPOConfig(
        output_dir=output_dir,
        use_cpu=not torch.cuda.is_available(),
        max_steps=settings["steps"],
        per_device_train_batch_size=settings["micro_batch_size"],
        gradient_accumulation_steps=batch // settings["micro_batch_size"],
        num_generations=settings["group_size"],
        max_completion_length=settings["response_tokens"],
        temperature=1.0,
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.01,
        adam_beta2=0.999,
        max_grad_norm=settings["clip_grad"],
        beta=settings["kl_coef"],
        loss_type="grpo",
        bf16=settings["bf16"],
        gradient_checkpointing=False,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        seed=settings["seed"],
        dataloader_pin_memory=False,
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    rows = [json.loads(line) for line in Path(settings["data"]).read_text().splitlines()]
    trainer = TimedTrainer(
        model=settings["model"],
        reward_funcs=first_integer,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(settings["model"], padding_side="left"),
        callbacks=[recorder],
    )
    recorder.trainer = trainer
    return trainer


def main(settings_path: str, result_path: str) -> None:
    """Train, and write the result."""
    settings = json.loads(Path(settings_path).read_text())
    recorder = StepRecorder(settings["count_flops"])
    with tempfile.TemporaryDirectory() as output_dir:
        make_trainer(settings, output_dir, recorder).train()
    result = {"steps": recorder.steps, "flops": recorder.flops, "threads": torch.get_num_threads()}
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
