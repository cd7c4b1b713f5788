"""The commands of ``slime-launch``: name, line in ``--help``, and the function that runs it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from slime_core.words import did_you_mean


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        function: ``module:name`` of a function, which is given the words after the command and returns the exit code.
        help: One line for ``slime-launch --help``.
    """

    function: str
    help: str

    def __call__(self, argv: list[str]) -> int:
        """Run it; its module is imported only now."""
        module, _, name = self.function.partition(":")
        return cast("Callable[[list[str]], int]", getattr(importlib.import_module(module), name))(argv)


COMMANDS = {
    "train": Command("slime_launch.train:train", "post-train a model"),
    "train-async": Command("slime_launch.train:train_async", "the same, generating the next rollout meanwhile"),
    "migrate": Command("slime_launch.migrate:migrate", "a script of upstream slime, TRL, verl or OpenRLHF as ours"),
    "doctor": Command("slime_launch.doctor:doctor", "whether a run could start on this machine, and what is missing"),
    "completion": Command("slime_launch.completion:completion", "completion of flags for bash or zsh"),
    "plan": Command("slime_launch.plan.command:plan", "say what such a command would do and need; starts nothing"),
    "report": Command("slime_launch.report.command:report", "write a page about a run: curves, timeline, samples"),
    "diff": Command("slime_launch.diff:diff", "the first step, sample, token and weight in which two runs part"),
    "replay": Command("slime_launch.replay:replay", "train on a rollout of a run again, and compare with the run"),
    "submit": Command("slime_launch.submit:submit", "print the command that runs it on a Ray cluster as a job"),
    "sft": Command("slime_launch.train:sft", "train on conversations: train --loss-type sft_loss"),
    "recipes": Command("slime_launch.new_task:recipes", "list the recipes: name, what each runs on, title"),
    "new": Command("slime_launch.new_task:new", "copy a recipe into a new folder to change, and say what to do next"),
    "eval": Command("slime_launch.train:evaluate", "only score held-out sets: train --num-rollout 0"),
}

MEANT: dict[tuple[str, ...], str] = {
    ("grpo", "rl", "rlhf", "rlvr"): "slime-launch train",
    ("ppo",): "slime-launch train --advantage-estimator ppo",
    ("gspo",): "slime-launch train --advantage-estimator gspo",
    ("cispo",): "slime-launch train --advantage-estimator cispo",
    ("rloo",): "slime-launch train --advantage-estimator rloo",
    ("reinforce", "reinforce++"): "slime-launch train --advantage-estimator reinforce_plus_plus",
    ("dr-grpo",): "slime-launch train --disable-grpo-std-normalization",
    ("dapo",): "slime-launch new NAME --from dapo",
    ("dpo",): "slime-launch sft --loss-type dpo_loss",
    ("rm", "reward", "reward-model"): "slime-launch sft --loss-type rm_loss",
    ("fine-tune", "finetune", "instruct"): "slime-launch sft",
    ("distill", "distillation", "gkd", "opd"): "slime-launch train --use-opd",
    ("lora",): "slime-launch train --lora-rank 8",
    ("async", "fully-async"): "slime-launch train-async",
    ("evaluate", "evaluation", "benchmark", "test"): "slime-launch eval",
    ("generate", "inference", "infer", "rollout"): "slime-launch train --debug-rollout-only",
    ("check", "dry-run", "estimate", "validate"): "slime-launch plan",
    ("compare",): "slime-launch diff",
    ("examples", "list"): "slime-launch recipes",
    ("create", "init"): "slime-launch new",
    ("continue", "resume"): "slime-launch train, with the flags of the run: it goes on from its --save",
    ("check-hooks",): "slime-rollout check-hooks",
    ("convert", "export"): "slime-convert --help",
    ("merge", "merge-lora"): "slime-convert merge-lora",
    ("list-models", "models"): "slime-convert list-models",
    ("help",): "slime-launch --help",
    ("version",): "slime-launch --version",
}
"""Names of commands in other launchers, in small letters with dashes, and the command that does the same here."""


def unknown_command(word: str) -> str:
    """The error line about a first word that is not a command."""
    from slime_rollout.checks import ENDS  # imports YAML, which --help does not need

    plain = word.lower().replace("_", "-").removesuffix(".py")
    names = (plain, plain.removeprefix("train-").removesuffix("-ray").removesuffix("-trainer"))
    if plain in COMMANDS:
        return f"unknown command {word}; did you mean {plain}?"
    if meant := next((text for words, text in MEANT.items() if not {*words}.isdisjoint(names)), None):
        return f"unknown command {word}; here it is {meant}"
    if plain.startswith("-") or plain.endswith(ENDS):
        flags = f"{word} …" if plain.startswith("-") else f"--config {word}"
        return f"unknown command {word}; a command comes first, such as slime-launch train {flags}"
    return f"unknown command {word}; {did_you_mean(plain, COMMANDS) or 'allowed: ' + ', '.join(COMMANDS)}"


def usage() -> str:
    """The text of ``slime-launch --help``."""
    rows = "\n".join(f"  {name:<12} {command.help}" for name, command in COMMANDS.items())
    return f"""\
usage: slime-launch COMMAND [flags]
       slime-launch --version

{rows}

`slime-launch COMMAND --help` lists the flags of a command."""
