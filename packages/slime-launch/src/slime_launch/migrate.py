"""``slime-launch migrate``: a command of upstream slime, TRL, verl or OpenRLHF as one of ours, flag by flag."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime_core.errors import ConfigError
from slime_core.flags import FlagSpec
from slime_launch.answers import OTHERS, Outcome, foreign_answer, named_here, table
from slime_launch.errors import FlagError
from slime_launch.flags import PREFIX, command
from slime_launch.parser import OneLineParser, parse, suggestions
from slime_launch.redact import HIDDEN, is_secret
from slime_launch.shell_words import TrainCommand, read_command, unresolved
from slime_launch.translate import Became, Context, Item, become, context, items, ours_of
from slime_megatron.arguments import has_no_effect, reason
from slime_megatron.megatron_words import answer, field_words
from slime_rollout.engine.router_flags import CONTROLLED as ROUTER_CONTROLLED
from slime_rollout.engine.router_flags import PREFIX as ROUTER_PREFIX
from slime_rollout.engine.sglang_flags import CONTROLLED

STOPS = (Outcome.NOT_BUILT, Outcome.REFUSED, Outcome.UNKNOWN)
WANDB_KEYS = ("--logger.wandb.key", "--use_wandb")
"""OpenRLHF's flags that take W&B's key, and switch it on."""
LOSSES = (("sft", "sft_loss"), ("dpo", "dpo_loss"), ("reward", "rm_loss"), ("_rm", "rm_loss"))
"""Parts of another launcher's program by which it trains on a data set, and our loss for it."""
ASYNC = ("train_async.py", "slime-launch train-async")


@dataclasses.dataclass(frozen=True)
class Migrated:
    """A command of another launcher as ours.

    Attributes:
        command: ``train`` or ``train-async``.
        flags: What became of each flag, in the order of the command.
        words: The words after ``slime-launch train`` that run here.
        open: What has to be given or changed before it does.
    """

    command: str
    flags: list[Became]
    words: list[str]
    open: list[str]

    @property
    def runs(self) -> bool:
        """Whether nothing of the command is missing here."""
        return not any(became.outcome in STOPS for became in self.flags)


def migrate(argv: list[str]) -> int:
    """``slime-launch migrate SCRIPT``: prints the table and the command.

    Returns:
        0 if every flag has its like here or needs none; 1 if one is not built, refused or unknown.
    """
    parser = OneLineParser(prog="slime-launch migrate", description=__doc__)
    parser.add_argument("--toml", metavar="FILE", help="write the flags to this file, for --config, not as a command")
    parser.add_argument(
        "script", nargs="+", help="a shell script, or the words of a command after `--`; a script is read, not run"
    )
    own, theirs = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    given = parser.parse_args([*own, *(["words"] if theirs else [])])
    found = read_command(shlex.join(theirs), Path.cwd()) if theirs else _read_script(given.script)
    done = migrated(found)
    for line in report(done):
        print(line)
    if given.toml:
        Path(given.toml).write_text(as_toml(done.words), encoding="utf-8")
        print(f"\nslime-launch {done.command} --config {shlex.quote(given.toml)}")
    else:
        print(f"\n{as_command(done)}")
    sys.stdout.flush()  # where both are one pipe, what follows is to come last
    for line in done.open:
        print(f"slime-launch: {line}", file=sys.stderr)
    return 0 if done.runs else 1


def _read_script(script: Sequence[str]) -> TrainCommand:
    path = Path(script[0])
    if path.is_file():
        if script[1:]:
            raise FlagError(f"unexpected {script[1]!r} after {path}; give one script, or the words after --")
        return read_command(path.read_text(encoding="utf-8"), path.parent)
    if len(script) == 1 and not any(letter.isspace() for letter in script[0]):
        raise ConfigError(f"{path} does not exist; give a shell script, or the words of a command after --")
    return read_command(" ".join(script), Path.cwd())


def migrated(theirs: TrainCommand) -> Migrated:
    """A command of another launcher as ours."""
    entry, argv = theirs.entry, theirs.words
    given = items(argv)
    typed = [item.name for item in given if item.name.startswith("--") and _set_by_slime(item.name) is None]
    typed += [named_here(item.name) for item in given]
    try:
        groups, parser = command(typed)
    except ConfigError:  # no SGLang here
        groups, parser = command([name for name in typed if not name.startswith(PREFIX)])
    known = {spec.name: spec for group in groups for spec in group.flags}
    around = context(given, known, foreign=True)
    found = [_of(item, around) for item in given]
    made = {word for became in found for word in became.words}
    found = [_without_what_it_needs(became, made, known) for became in found]
    words = [word for became in found for word in became.words]
    words += _defaults(entry, words, around)
    problems = [f"{name} is assigned in no file that could be read; its flags are left out" for name in theirs.unset]
    problems += [f"{name} is known only where the script runs; put its value" for name in unresolved(words)]
    try:
        parse(groups, parser, words)
    except FlagError as error:
        problems += str(error).splitlines()
    return Migrated("train-async" if entry in ASYNC else "train", found, words, problems)


def _of(item: Item, around: Context) -> Became:
    """What became of one flag, with SGLang's and unknown ones."""
    if own := _set_by_slime(item.name):
        return Became(item, Outcome.NO_EFFECT, (), own)
    if item.name in WANDB_KEYS and item.values:
        return Became(Item(item.name, (HIDDEN,)), Outcome.RENAMED, ("--use-wandb",), "set WANDB_API_KEY where it runs")
    if is_secret(item.name):
        note = "left out: set WANDB_API_KEY where it runs" if item.name == "--wandb-key" else "left out: a secret"
        return Became(Item(item.name, (HIDDEN,)), Outcome.RENAMED, (), note)
    became = become(item, around)
    word = field_words().get(item.name)
    if became.outcome is Outcome.SAME and word is not None:
        if word.is_refused:
            return Became(item, Outcome.REFUSED, (), reason(word.field) or "Megatron has it, slime does not")
        if has_no_effect(word.field):
            return Became(item, Outcome.NO_EFFECT, (), reason(word.field))
    if became.outcome is not Outcome.UNKNOWN:
        return became
    if (megatrons := answer(item.name, item.values)) is not None:
        return Became(item, Outcome.NO_EFFECT if megatrons.has_no_effect else Outcome.REFUSED, (), megatrons.reason)
    if not item.name:
        return Became(item, Outcome.UNKNOWN, (), "belongs to no flag")
    near = suggestions(item.name, around.known)
    return Became(item, Outcome.UNKNOWN, (), f"did you mean {', '.join(near)}?" if near else "nobody's flag")


def _without_what_it_needs(became: Became, made: set[str], known: Mapping[str, FlagSpec]) -> Became:
    """What became of a flag that has an effect beside another one of ours alone, which the command has not."""
    answer = None if became.item.name in known else foreign_answer(became.item.name, known)
    if answer is None or not became.words or not answer.with_flag or answer.with_flag in made:
        return became
    return Became(
        became.item, Outcome.NO_EFFECT, (), f"it is {answer.to} beside {answer.with_flag}, which is not given"
    )


def _set_by_slime(name: str) -> str | None:
    """Why a flag of SGLang's or its router's cannot be given; ``None`` if it can."""
    for prefix, controlled in ((PREFIX, CONTROLLED), (ROUTER_PREFIX, ROUTER_CONTROLLED)):
        if name.startswith(prefix) and (reason := controlled.get(name.removeprefix(prefix))):
            return reason
    return None


def _defaults(entry: str, words: Sequence[str], around: Context) -> list[str]:
    """Values that another launcher takes where a command gives none, and ours does not."""
    if entry in ("train.py", "train_async.py"):
        missing = {f"--{name}": value for name, value in table()["defaults"].items() if f"--{name}" not in words}
        return [word for pair in missing.items() for word in pair]
    if not entry or entry.startswith("slime-launch"):
        return []
    loss = next((loss for part, loss in LOSSES if part in entry), None)
    if loss is not None:
        return ["--loss-type", loss]
    placed = "--rollout-num-gpus" in words or "--colocate" in words
    launcher = next((name for name in OTHERS if entry.startswith(name)), "trl")  # grpo.py is TRL's
    return [*_their_defaults(launcher, around), *([] if placed else ["--colocate"])]


def _their_defaults(launcher: str, around: Context) -> list[str]:
    dashes = "" if launcher == "verl" else "--"
    rows = table()[f"{launcher}-defaults"].items()
    values = [(name, row if isinstance(row, dict) else {"value": row}) for name, row in rows]
    missing = [
        Item(f"{dashes}{name}", tuple(row["value"].split()))
        for name, row in values
        if "with" not in row or row["with"] in around.ours
    ]
    found = [become(item, around) for item in missing if ours_of(item.name, around.known) not in around.ours]
    # A coefficient may have gone to another flag than its row names.
    return [word for became in found if not around.ours.intersection(became.words[:1]) for word in became.words]


def report(done: Migrated) -> list[str]:
    """A line for each flag: what it was, what became of it, and why."""
    rows = []
    for became in done.flags:
        shown = " ".join(became.item.words)
        ours = " ".join(became.words) if became.outcome is Outcome.RENAMED else ""
        rows.append((shown if len(shown) <= 60 else shown[:59] + "…", became.outcome.value, ours or became.note))
    width = max((len(shown) for shown, _, _ in rows), default=0)
    lines = [f"{shown:<{width}}  {outcome:<9}  {what}".rstrip() for shown, outcome, what in rows]
    counts = {outcome: sum(became.outcome is outcome for became in done.flags) for outcome in Outcome}
    return [*lines, "", ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count)]


def as_command(done: Migrated) -> str:
    """The command, a flag on each line."""
    parts = [" ".join(shlex.quote(word) for word in item.words) for item in items(done.words)]
    return " \\\n    ".join([f"slime-launch {done.command}", *parts])


def as_toml(words: Sequence[str]) -> str:
    """Words of ours as a file for ``--config``."""
    groups, _ = command([item.name for item in items(words)])
    known = {spec.name: spec for group in groups for spec in group.flags}
    values: dict[str, list[str]] = {}
    for item in items(words):
        values.setdefault(item.name, []).extend(item.values)
    return "".join(f"{name.removeprefix('--')} = {_toml(known.get(name), found)}\n" for name, found in values.items())


def _toml(spec: FlagSpec | None, values: Sequence[str]) -> str:
    if not values:
        return "true"
    if spec is not None and spec.nargs:
        return json.dumps(list(values), ensure_ascii=False)
    is_number = spec is not None and spec.type is int and values[-1].lstrip("-").isdecimal()
    return values[-1] if is_number else json.dumps(values[-1], ensure_ascii=False)
