"""No page names a flag that no command has, or a place that is not there; the commands that it shows can be typed."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_convert.cli import build_parser as convert_parser
from slime_core.flags import flag_specs
from slime_launch.flags import parse_train, train_groups
from slime_launch.plan.command import PlanConfig
from slime_launch.validate import check_settings
from slime_megatron.core_fields import core_fields
from slime_rollout import cli as rollout

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for pattern in ("*.md", "docs/**/*.md", "examples/*/*.md", "packages/*/README.md", "packages/*/docs/*.md")
    for path in sorted(ROOT.glob(pattern))
}
OTHERS = {
    "SGLang": {"--context-length", "--enable-deterministic-inference", "--model-path", "--port"}
    | {"--enable-memory-saver", "--nnodes", "--sglang-api-key", "--sglang-enable-metrics"}
    | {"--sglang-speculative-" + name for name in ("algorithm", "eagle-topk", "num-draft-tokens", "num-steps")},
    "Megatron": {f"--{name.replace('_', '-')}" for name in core_fields()},
    "slime-launch": {"--help", "--help-megatron", "--help-router", "--help-sglang", "--toml"},
    "scripts": {"--device", "--dry-run", "--full", "--quick", "--steps"},
    "TensorBoard, uv, Ray": {"--address", "--generate", "--head", "--logdir", "--node-ip-address", "--python"}
    | {"--ray-address"},
    "Slurm": {"--gpus-per-node", "--nodes"},
}


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _options(command)


TRAIN = {spec.name for group in train_groups() for spec in group.flags}
PLAN = {spec.name for spec in flag_specs(PlanConfig)}
KNOWN = TRAIN.union(PLAN, _options(convert_parser()), _options(rollout._parser()), *OTHERS.values())
every_page = pytest.mark.parametrize("page", PAGES)
FLAGS_PAGE = "docs/reference/flags.md"
"""Generated; it also has the flags of other launchers."""


def _flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])", text))


@every_page
def test_flags_are_those_of_a_command(page: str) -> None:
    assert page == FLAGS_PAGE or sorted(_flags(PAGES[page]) - KNOWN) == []


def test_every_flag_of_the_page_of_algorithms_is_one_of_ours() -> None:
    named = _flags(PAGES["docs/reference/algorithms.md"])
    assert len(named) > 40
    assert named <= TRAIN


@every_page
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if re.match("https?://", target):
            continue
        path, _, place = target.partition("#")
        to = (ROOT / page).parent / path if path else ROOT / page
        assert to.is_file(), target
        headings = re.findall(r"^#+ (.*)$", to.read_text(encoding="utf-8").lower(), re.MULTILINE)
        assert not place or place in {re.sub(r"[^\w -]", "", text).replace(" ", "-") for text in headings}, target


@pytest.mark.parametrize(
    "page", [page for page, text in PAGES.items() if re.search(r"^ *slime-launch train", text, re.M)]
)
def test_train_commands_can_be_typed(page: str) -> None:
    model_args = subprocess.run(
        ["bash", "-c", 'source scripts/models/qwen3-4B.sh; echo "${MODEL_ARGS[@]}"'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    ).stdout
    for command in re.findall(r"^ *slime-launch train (.*?[^\\])\n", PAGES[page], re.DOTALL | re.MULTILINE):
        if "…" in command:
            continue
        command = command.replace("\\\n", " ").replace('"${MODEL_ARGS[@]}"', model_args)
        check_settings(parse_train(shlex.split(command)))
