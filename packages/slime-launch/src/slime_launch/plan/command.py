"""``slime-launch plan``: the words of a training command, with a few of its own in front, behind or between."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

from slime_core.flags import Config, flag, flag_specs
from slime_launch.errors import Problems
from slime_launch.flags import read_train
from slime_launch.parser import FlagGroup, build_parser, parse

DESCRIPTION = """\
Say what a training command would do and need, and what is wrong with it; nothing is started.

It takes every flag of `slime-launch train`, and these:"""
EPILOG = "Exit codes: 0 the command can start, 2 it cannot; the problems are printed, each with what to do."


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(Config):
    """The flags that a plan has besides those of training.

    Raises:
        ConfigError: A value is outside its range.
    """

    device: str | None = flag(
        None,
        help="plan for this device instead of this machine, such as h100, h200, a100 or cpu; what only the machine "
        "itself can show (directories that can be written, free ports, an installed SGLang) is then not checked",
    )
    device_memory_gib: float | None = flag(
        None, unit="GiB", help="memory of a device, where it is another than usual", above=0
    )
    gpus_per_node: int = flag(8, unit="GPUs", help="GPUs of a node", least=1)
    json: bool = flag(False, help="print the plan as JSON")


def plan(argv: list[str]) -> int:
    """Print the plan of a command; returns 0, or 2 if the command cannot work."""
    specs = flag_specs(PlanConfig)
    groups = [FlagGroup("plan", tuple(specs))]
    parser = build_parser(groups, prog="slime-launch plan", description=DESCRIPTION, epilog=EPILOG)
    if "--help" in argv or "-h" in argv:
        parser.print_help()
        return 0
    own, words = split_words(argv, {spec.name: not spec.is_switch for spec in specs})
    config = PlanConfig(**parse(groups, parser, own))
    settings, contradictions = read_train(words)
    from slime_launch.plan.build import make_plan
    from slime_launch.plan.devices import find_device
    from slime_launch.plan.text import plan_text

    device = find_device(config.device, config.device_memory_gib)
    problems = Problems(contradictions)
    found = make_plan(
        settings, problems, device, gpus_per_node=config.gpus_per_node, elsewhere=config.device is not None
    )
    print(json.dumps(found.as_json(), indent=2, ensure_ascii=False) if config.json else plan_text(found))
    if found.problems and not config.json:
        sys.stdout.flush()
        print("\nthis command cannot start:", file=sys.stderr)
    for line in found.problems:
        print(f"slime-launch: {line}", file=sys.stderr)
    return 2 if found.problems else 0


def split_words(argv: Sequence[str], known: dict[str, bool]) -> tuple[list[str], list[str]]:
    """The words of some flags, and all others; ``known`` says whether a flag has a value."""
    own: list[str] = []
    others: list[str] = []
    words = iter(argv)
    for word in words:
        name, _, attached = word.partition("=")
        if name not in known:
            others.append(word)
            continue
        own.append(word)
        if known[name] and not attached:
            own.extend(value for value in [next(words, None)] if value is not None)
    return own, others
