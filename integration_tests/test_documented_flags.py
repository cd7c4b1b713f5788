"""No page names a flag that no command has. (`scripts/docs` checks links, `test_pages.py` commands.)"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest
from launching import engine_python
from pages import blocks, pages
from stand_ins import COMMANDS

from slime_convert.cli import build_parser as convert_parser
from slime_core.flags import flag_specs
from slime_launch.answers import table
from slime_launch.flags import read_train, train_groups
from slime_launch.parser import without
from slime_launch.plan.command import PlanConfig
from slime_launch.replay import ReplayConfig
from slime_launch.report.command import ReportConfig
from slime_megatron.settings.megatron_fields import megatron_fields
from slime_rollout import cli as rollout
from slime_rollout.engine.router_flags import router_specs
from slime_rollout.engine.sglang_flags import CONTROLLED, installed_flags

ROOT = Path(__file__).resolve().parents[1]
PAGES = pages()
OTHERS = {
    "SGLang, behind our prefix": {f"--sglang-{name}" for name in installed_flags(engine_python())}
    | {"--sglang-config"},
    "sglang-router": {"--router-policy", *(spec.name for spec in router_specs().values())},
    "SGLang": {"--context-length", "--enable-deterministic-inference", "--model-path", "--port"}
    | {"--enable-memory-saver", "--host", "--nnodes", "--sglang-api-key", "--sglang-enable-metrics", "--tp"}
    | {"--sglang-speculative-" + name for name in ("algorithm", "eagle-topk", "num-draft-tokens", "num-steps")},
    "Megatron": {f"--{name.replace('_', '-')}" for name in megatron_fields()},
    "slime-launch": {"--help", "--help-megatron", "--help-router", "--help-sglang", "--toml"},
    "scripts": {
        "--changed",
        "--device",
        "--dry-run",
        "--full",
        "--list",
        "--quick",
        "--record",
        "--save-baseline",
        "--steps",
    },
    "TensorBoard, uv, Ray": {"--address", "--generate", "--head", "--logdir", "--node-ip-address", "--python"}
    | {"--find-links", "--ray-address"},
    "Slurm": {"--exclusive", "--gpus-per-node", "--ip-address", "--nodes", "--time"},
    "Docker, SkyPilot": {"--build-arg", "--env", "--gpus", "--ipc", "--rm", "--secret", "--shm-size"},
}


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _options(command)


TRAIN = {spec.name for group in train_groups() for spec in group.flags}
PLAN = {spec.name for config in (PlanConfig, ReportConfig, ReplayConfig) for spec in flag_specs(config)}
PLANS_OWN = {spec.name for spec in flag_specs(PlanConfig)}
SWITCHED_OFF = {f"--no-{spec.name[2:]}" for group in train_groups() for spec in group.flags if spec.is_switch}
KNOWN = TRAIN.union(SWITCHED_OFF, PLAN, _options(convert_parser()), _options(rollout._parser()), *OTHERS.values())
every_page = pytest.mark.parametrize("page", PAGES)
THEIRS = {
    f"--{part.replace('_', '-')}" for rows in table().values() for name in rows for part in (name, name.split(".")[0])
}
"""Flags of other launchers, and what stands before a dot in them: pages about coming from there show them."""
FLAGS_PAGE = "docs/reference/flags.md"
"""Generated; it also has the flags of other launchers."""


def _flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])", text))


def _without_others_commands(page: str) -> str:
    """A page's text without the commands of other programs."""
    text = PAGES[page]
    for block in blocks(page, text):
        if block.language == "bash":
            for command in block.text.replace("\\\n", "\0").splitlines():
                if not re.search(r"slime-|scripts/", command):
                    text = text.replace(command.replace("\0", "\\\n"), "")
    return text


@every_page
def test_flags_are_those_of_a_command(page: str) -> None:
    known = KNOWN | THEIRS if "slime-launch migrate" in PAGES[page] else KNOWN
    assert page == FLAGS_PAGE or sorted(_flags(_without_others_commands(page)) - known) == []


def test_every_flag_of_the_page_of_algorithms_is_one_of_ours() -> None:
    named = _flags(PAGES["docs/reference/algorithms.md"])
    assert len(named) > 40
    assert named <= TRAIN


@every_page
def test_no_command_that_runs_has_a_flag_without_effect(page: str) -> None:
    """Those that are only planned go through all of a plan, in `test_pages.py`; those that run do so under --full."""
    for block in blocks(page, PAGES[page]):
        for command in re.sub(r"\\\n", " ", block.text).splitlines() if block.kinds[:1] == ["run"] else ():
            words = shlex.split(command.partition("slime-launch ")[2], comments=True)
            if not words or words[0] not in COMMANDS or "--config" in words:
                continue
            words = words[: next((place for place, word in enumerate(words) if word[0] in ">|&;"), len(words))]
            flags = without(words[1:], PLANS_OWN if words[0] == "plan" else ())
            _, problems = read_train([*COMMANDS[words[0]], *flags], on_gpu=False, planned=True)
            assert not [line for line in problems if "no effect" in line], f"{block.where}: {problems}"


def test_the_flags_that_commands_are_read_with_are_those_of_the_installed_sglang() -> None:
    """The launcher's list, for places without SGLang."""
    listed = resources.files("slime_launch").joinpath("sglang_flags.txt").read_text(encoding="utf-8")
    kinds = dict(line.split() for line in listed.splitlines())
    installed = {
        name: ("switch" if not flag.takes_value else flag.type + "+" * flag.several)
        for name, flag in installed_flags(engine_python()).items()
        if name not in CONTROLLED
    }
    assert kinds == installed
