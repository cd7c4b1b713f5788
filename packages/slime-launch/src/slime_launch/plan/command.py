"""``slime-launch plan``: the words of a training command, with a few of its own in front, behind or between."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_core.files import write_whole
from slime_core.flags import Config, flag, flag_specs
from slime_core.needs import given
from slime_core.words import shortened
from slime_launch.config import Settings
from slime_launch.devices import find_device
from slime_launch.errors import FlagError, Problems
from slime_launch.flags import own_flags, read_train
from slime_launch.names import absent_models, models, with_paths
from slime_launch.parser import FlagGroup, build_parser, check_has_flags, parse
from slime_launch.redact import without_secrets

DESCRIPTION = """\
Say what a training command would do and need, and what is wrong with it; nothing is started. Functions that flags
name are imported, to check their arguments.

It takes every flag of `slime-launch train`, and these:"""
EPILOG = "Exit codes: 0 the command can start, 2 it cannot; the problems are printed, each with what to do."


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(Config, needs=()):
    """The flags that a plan has besides those of training.

    Raises:
        ConfigError: A value is outside its range.
    """

    device: str | None = flag(
        None,
        help="plan for this device instead of this machine, such as h100, h200, a100 or cpu; what only the machine "
        "itself can show (directories that can be written, free ports) is then not checked",
    )
    device_memory_gib: float | None = flag(
        None, unit="GiB", help="memory of a device, where it is another than usual", above=0
    )
    gpus_per_node: int = flag(8, unit="GPUs", help="GPUs of a node", least=1)
    json: bool = flag(False, help="print the plan as JSON")
    simulate: bool = flag(
        False,
        help="simulate the command in place of the plan, and other splits of its GPUs and other --async-buffer-size: "
        "throughput, idle shares, staleness, and the command of the best; needs --profile",
    )
    profile: str | None = flag(
        None,
        metavar="FILE",
        help="with --simulate: speeds of a run, as `slime-launch report RUN --profile FILE` writes them",
        needs=given("simulate"),
    )
    picture: str = flag(
        "simulated.png", metavar="FILE", help="with --simulate: where the picture goes", needs=given("simulate")
    )
    write: str | None = flag(
        None,
        metavar="FILE",
        help="if the command can start, write all its settings, defaults too, to a TOML file for --config",
    )

    def contradictions(self) -> Iterator[str]:
        """A file whose name says another format; a simulation of no speeds."""
        if self.write is not None and not self.write.endswith(".toml"):
            yield f"--write {self.write} must end in .toml"
        if self.simulate and self.profile is None:
            yield "--simulate needs speeds; add --profile FILE, which `slime-launch report RUN --profile FILE` writes"
        if not self.picture.endswith((".png", ".svg", ".pdf")):
            yield f"--picture {self.picture} must end in .png, .svg or .pdf"


def plan(argv: list[str]) -> int:
    """Print the plan of a command; returns 0, or 2 if the command cannot work."""
    specs = flag_specs(PlanConfig)
    groups = [FlagGroup("plan", tuple(specs))]
    parser = build_parser(groups, prog="slime-launch plan", description=DESCRIPTION, epilog=EPILOG)
    if "--help" in argv or "-h" in argv:
        parser.print_help()
        return 0
    problems = Problems()
    problems.attempt(check_has_flags, argv, {**own_flags(), **{spec.name: spec for spec in specs}})
    if problems.lines:
        return _say(problems.lines, as_json="--json" in argv)
    known = {spec.name: not spec.is_switch for spec in specs}
    if "--simulate" not in argv:  # then --profile is the trainers'
        del known["--profile"]
    own, words = split_words(argv, known, others_follow=False)
    config = problems.attempt(lambda: PlanConfig(**parse(groups, parser, own)))
    device = None if config is None else problems.attempt(find_device, config.device, config.device_memory_gib)
    if config is None or device is None:
        return _refused(problems, words, as_json="--json" in own)
    elsewhere = config.device is not None
    read = problems.attempt(read_train, words, on_gpu=not device.is_cpu, planned=True)
    if read is None:
        return _say(problems.lines, as_json=config.json)
    settings, found_already = read
    if elsewhere:  # the interpreter is on that machine
        found_already = [line for line in found_already if not line.startswith("--sglang-python ")]
    if config.simulate:
        return _simulate(config, settings, found_already, words)
    from slime_launch.plan.build import make_plan
    from slime_launch.plan.text import plan_text

    problems = Problems(found_already, settings.unread)
    found = make_plan(settings, problems, device, gpus_per_node=config.gpus_per_node, elsewhere=elsewhere, words=words)
    print(json.dumps(found.as_json(), indent=2, ensure_ascii=False) if config.json else plan_text(found))
    if found.problems:
        return _say(found.problems)
    if config.write is not None:
        write_whole(Path(config.write), as_config(settings.flags() | found.derived))
        print(f"\nslime-launch train --config {shlex.quote(config.write)}", file=sys.stderr)
    return 0


def _simulate(config: PlanConfig, settings: Settings, problems: list[str], words: list[str]) -> int:
    """Print the table and write the picture; 2 if there is a problem."""
    if problems:
        return _say(problems, as_json=config.json)
    from slime_launch.console import RunConsole
    from slime_launch.plan.profile import read_profile
    from slime_launch.plan.simulated import save_picture, simulate_command, simulated_text

    profile, picture = read_profile(Path(str(config.profile))), Path(config.picture)
    with RunConsole(sys.stderr).wait("simulate") as wait:
        found = simulate_command(
            profile,
            settings,
            words,
            gpus_per_node=config.gpus_per_node,
            on_way=lambda done, total: wait.update(done=done, total=total),
        )
    try:
        save_picture(found, picture)
    except OSError as error:
        raise FlagError(f"--picture {picture} cannot be written ({error.strerror}); give another file") from None
    print(json.dumps(found.as_json(), indent=2, ensure_ascii=False) if config.json else simulated_text(found, picture))
    return 0


def _refused(own: Problems, words: list[str], *, as_json: bool) -> int:
    """An unknown device gives no plan; what is wrong with the rest of the command is reported too."""
    from slime_launch.preflight import look

    given = own.attempt(read_train, words, planned=True)
    problems = Problems([*own.lines, *(given[1] if given else ())], given[0].unread if given else ())
    if given:
        settings = with_paths(given[0], problems, weights=False)
        absent = absent_models(models(given[0]), models(settings))
        look(settings, problems, elsewhere=True, planned=True, absent=absent)
    return _say(problems.lines, as_json=as_json)


def _say(problems: Sequence[str], *, as_json: bool = False) -> int:
    """Print what is wrong; ``as_json`` where no plan could be printed."""
    if as_json:
        print(json.dumps({"problems": [*problems]}, indent=2, ensure_ascii=False))
    sys.stdout.flush()
    print("\nthis command cannot start:", file=sys.stderr)
    for line in problems:
        print(f"slime-launch: {shortened(line)}", file=sys.stderr)
    return 2


def as_config(flags: Mapping[str, Any]) -> str:
    """Every flag that has a value, given or not, as a TOML file for ``--config``; secrets are left out."""
    values = {name.replace("_", "-"): value for name, value in flags.items() if name != "config"}
    clean = without_secrets(values, os.environ)
    lines = [
        f"{name} = {json.dumps(value, ensure_ascii=False)}\n"
        for name, value in clean.items()
        if value is not None and value is not False and value != [] and value == values[name]
    ]
    return "".join(lines)


def split_words(
    argv: Sequence[str], known: dict[str, bool], *, others_follow: bool = True
) -> tuple[list[str], list[str]]:
    """The words of the ``known`` flags, which says of each whether it has a value, and all others.

    ``others_follow`` is whether a word after such a flag and its value is one of the others; else it is among the
    first, where it is unexpected.
    """
    own: list[str] = []
    others: list[str] = []
    into = others
    words = iter(argv)
    for word in words:
        name, _, attached = word.partition("=")
        if name not in known:
            into = others if others_follow or word.startswith("-") else into
            into.append(word)
            continue
        into = own
        own.append(word)
        if known[name] and not attached:
            own.extend(value for value in [next(words, None)] if value is not None)
    return own, others
