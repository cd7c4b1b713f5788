"""``slime-launch migrate``: a command of upstream slime, TRL, verl or OpenRLHF as one of ours, flag by flag."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime_core.algorithms import ADVANTAGE_ESTIMATORS, LOSSES, names
from slime_core.config import PAIR_LOSSES
from slime_core.errors import ConfigError
from slime_core.files import MOST_WRITTEN, read_text
from slime_core.flags import FlagSpec
from slime_core.redact import HIDDEN, is_secret
from slime_core.words import shortened, suggestions
from slime_launch.answers import OTHERS, Outcome, data_answer, foreign_answer, named_here, table
from slime_launch.errors import FlagError, Problems
from slime_launch.flags import command, known_sglang_specs, own_flags, read_anywhere, set_by_slime
from slime_launch.names import HUB_NAME
from slime_launch.parser import WordsParser
from slime_launch.shell_words import POSITIONAL, VARIABLE, TrainCommand, as_shell, plain, read_command, unresolved
from slime_launch.translate import SETTING, Became, Context, Item, become, context, items, ours_of, renamed
from slime_launch.validate import check_settings
from slime_megatron.service import field_words, word_answer

STOPS = (Outcome.NOT_BUILT, Outcome.REFUSED, Outcome.UNKNOWN)
WANDB_KEYS = ("--logger.wandb.key", "--use_wandb")
"""OpenRLHF's flags that take W&B's key, and switch it on."""
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
    parser = WordsParser(prog="slime-launch migrate", description=__doc__)
    parser.add_argument("--toml", metavar="FILE", help="write the flags to this file, for --config, not as a command")
    parser.add_argument(
        "script", nargs="+", help="a shell script, or the words of a command after `--`; a script is read, not run"
    )
    own, theirs = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    given = parser.parse_args([*own, *(["words"] if theirs else [])])
    found = read_command(shlex.join(theirs), None) if theirs else _read_script(given.script)
    done = migrated(found)
    for line in report(done):
        print(plain(line))
    if given.toml:
        Path(given.toml).write_text(as_toml(done.words), encoding="utf-8")  # written: also to a device, as one said
        print(f"\nslime-launch {done.command} --config {shlex.quote(given.toml)}")
    else:
        print(f"\n{as_command(done)}")
    sys.stdout.flush()  # where both are one pipe, what follows is to come last
    for line in done.open:
        print(f"slime-launch: {shortened(plain(line))}", file=sys.stderr)
    return 0 if done.runs else 1


def _read_script(script: Sequence[str]) -> TrainCommand:
    path = Path(script[0])
    if path.is_file():
        if script[1:]:
            raise FlagError(f"unexpected {script[1]!r} after {path}; give one script, or the words after --")
        try:
            text = read_text(path, most=MOST_WRITTEN)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read as a script: {error}; give a text in UTF-8") from None
        if _is_python(path, text):
            raise ConfigError(
                f"{path} is a Python script: its settings are made by code, which is not run; give its settings as "
                "flags behind --, such as `slime-launch migrate -- trl grpo --learning_rate 1e-6`"
            )
        return read_command(text, path.resolve().parent)
    if len(script) == 1 and not any(letter.isspace() for letter in script[0]):
        raise ConfigError(f"{path} does not exist; give a shell script, or the words of a command after --")
    return read_command(" ".join(script), None)


def _is_python(path: Path, text: str) -> bool:
    first = text.partition("\n")[0]
    if path.suffix == ".py" or (first.startswith("#!") and "python" in first):
        return True
    try:
        return any(isinstance(part, ast.Import | ast.ImportFrom) for part in ast.parse(text).body)
    except (SyntaxError, ValueError):
        return False


def migrated(theirs: TrainCommand) -> Migrated:
    """A command of another launcher as ours."""
    entry, problems = theirs.entry, list[str]()
    given = items(_without_arguments(theirs.words, problems))
    typed = [item.name for item in given if item.name.startswith("--") and set_by_slime(item.name) is None]
    typed += [named_here(item.name) for item in given]
    known = _known(typed)
    given = [_without_more(item, known, problems) for item in given]
    around = dataclasses.replace(context(given, known, foreign=True), hf_checkpoint=None)  # no file is read
    if _loss(entry) is not None:
        around = dataclasses.replace(around, on_data=True)
        around = dataclasses.replace(around, ours=frozenset(_named(name, around) for name in around.given))
    if _loss(entry) not in PAIR_LOSSES:
        around = dataclasses.replace(around, numbers={**around.numbers, "pairs": 1})
    found = [_of(item, around) for item in given]
    made = {word for became in found for word in became.words}
    found = [_without_what_it_needs(became, made, known) for became in found]
    words = [word for became in found for word in became.words]
    words += _defaults(entry, words, around)
    problems += [f"{name} is assigned in no file that could be read; its flags are left out" for name in theirs.unset]
    problems += [f"{name} is known only where the script runs; put its value" for name in unresolved(words)]
    problems += [*_unsaid(entry, words, around), *_problems(words)]
    return Migrated("train-async" if entry in ASYNC else "train", found, words, problems)


def _known(names: Sequence[str], *, typed: bool = False) -> dict[str, FlagSpec]:
    """Our flags by name, with SGLang's (``typed`` or as texts) and Megatron's where one is named."""
    groups, _ = command(names, known_sglang_specs(typed=typed))
    return {spec.name: spec for group in groups for spec in group.flags}


def _without_arguments(words: Sequence[str], problems: list[str]) -> list[str]:
    """The words without what the script is called with, which a line among the ``problems`` says."""
    if left_out := [word for word in words if POSITIONAL.fullmatch(word)]:
        problems.append(f"{left_out[0]} is left out: add the flags that the script is called with")
    return [word for word in words if not POSITIONAL.fullmatch(word)]


def _without_more(item: Item, known: Mapping[str, FlagSpec], problems: list[str]) -> Item:
    """A flag without variables behind the values that it takes: they hold other flags, which nobody knows here."""
    spec = known.get(ours_of(item.name, known))
    takes = 1 if SETTING.fullmatch(f"{item.name}=") else len(item.values)
    if spec is not None and not spec.nargs:
        takes = 0 if spec.is_switch and item.name.startswith("--") else 1
    more = [value for value in item.values[takes:] if VARIABLE.fullmatch(value)]
    problems += [f"{value} is left out: what it holds is known only where the script runs; add that" for value in more]
    return Item(item.name, (*item.values[:takes], *(value for value in item.values[takes:] if value not in more)))


def _become(item: Item, around: Context) -> Became:
    """The outcome of one flag, also of a program that trains on a data set."""
    answer = data_answer(item.name) if around.on_data else None
    return become(item, around) if answer is None else renamed(item, answer, around)


def _named(name: str, around: Context) -> str:
    """Our name of one flag, likewise."""
    answer = data_answer(name) if around.on_data else None
    return ours_of(name, around.known) if answer is None else answer.to


def _problems(words: Sequence[str]) -> list[str]:
    """Why the words could not start a run anywhere, as far as no file says it."""
    try:
        given = [item for item in items(words) if item.name != "--num-epoch"]
        rows = [] if len(given) == len(items(words)) else ["--num-rollout", str(10**9)]  # the data says how many
        settings, found = read_anywhere([*(word for item in given for word in item.words), *rows])
    except FlagError as error:
        return str(error).splitlines()
    found = [line for line in found if not line.startswith("--sglang-python ")]  # it is where the run is
    problems = Problems(found, settings.unread)
    problems.attempt(check_settings, settings)
    return problems.lines


def _of(item: Item, around: Context) -> Became:
    """The outcome of one flag, also of SGLang's and unknown ones."""
    if item.name == "--config":
        note = "it names a file of settings, which is not read; give them as flags"
        return Became(item, Outcome.REFUSED, (), note)
    if own := set_by_slime(item.name):
        return Became(item, Outcome.NO_EFFECT, (), own)
    if item.name in WANDB_KEYS and item.values:
        return Became(Item(item.name, (HIDDEN,)), Outcome.RENAMED, ("--use-wandb",), "set WANDB_API_KEY where it runs")
    if is_secret(item.name):
        note = "left out: set WANDB_API_KEY where it runs" if item.name == "--wandb-key" else "left out: a secret"
        return Became(Item(item.name, (HIDDEN,)), Outcome.RENAMED, (), note)
    became = _become(item, around)
    word = field_words().get(item.name)
    if became.outcome is Outcome.SAME and word is not None and item.name not in own_flags():
        if word.is_refused:
            return Became(item, Outcome.REFUSED, (), word.reason or "Megatron has it, slime does not")
        if word.has_no_effect:
            return Became(item, Outcome.NO_EFFECT, (), word.reason)
    if became.outcome is not Outcome.UNKNOWN:
        return became
    if (megatrons := word_answer(item.name, item.values)) is not None:
        return Became(item, Outcome.NO_EFFECT if megatrons.has_no_effect else Outcome.REFUSED, (), megatrons.reason)
    if not item.name:
        return Became(item, Outcome.UNKNOWN, (), "belongs to no flag")
    near = suggestions(item.name, around.known)
    return Became(item, Outcome.UNKNOWN, (), f"did you mean {', '.join(near)}?" if near else "nobody's flag")


def _without_what_it_needs(became: Became, made: set[str], known: Mapping[str, FlagSpec]) -> Became:
    """The outcome of a flag; without effect if it needs another one of ours that the command has not."""
    answer = None if became.item.name in known else foreign_answer(became.item.name, known)
    if answer is None or not became.words or not answer.with_flag or answer.with_flag in made:
        return became
    return Became(
        became.item, Outcome.NO_EFFECT, (), f"it is {answer.to} beside {answer.with_flag}, which is not given"
    )


def _defaults(entry: str, words: Sequence[str], around: Context) -> list[str]:
    """Values that another launcher takes where a command gives none, and ours does not."""
    if entry in ("train.py", "train_async.py"):
        missing = {f"--{name}": value for name, value in table()["defaults"].items() if f"--{name}" not in words}
        return [word for pair in missing.items() for word in pair]
    launcher = _launcher(entry)
    if launcher is None:
        return []
    loss = _loss(entry)
    if loss is not None:
        return [*_their_defaults(f"{launcher}-{loss.removesuffix('_loss')}-defaults", around), "--loss-type", loss]
    found = _their_defaults(f"{launcher}-defaults", around)
    if not {*words, *found}.isdisjoint(names(ADVANTAGE_ESTIMATORS, lambda row: row.needs_critic)):
        found += _their_defaults(f"{launcher}-critic-defaults", around)
    if "--save-interval" in words:
        found += _their_defaults(f"{launcher}-save-defaults", around)
    placed = "--rollout-num-gpus" in words or "--colocate" in words
    always = [word for word in table()["always"].get(launcher, ()) if word not in words]
    return [*found, *always, *([] if placed else ["--colocate"])]


def _launcher(entry: str) -> str | None:
    """Whose program it is; ``None`` for slime's, and for flags alone."""
    if not entry or entry in ("train.py", "train_async.py") or entry.startswith("slime-launch"):
        return None
    return next((name for name in OTHERS if entry.startswith(name)), "trl")  # grpo.py is TRL's


def _loss(entry: str) -> str | None:
    """Our loss, if another launcher's program trains on a data set."""
    if _launcher(entry) is None:
        return None
    return next((loss for loss, row in LOSSES.items() if any(part in entry for part in row.programs)), None)


def _their_defaults(section: str, around: Context) -> list[str]:
    dashes = "" if section.startswith("verl") else "--"
    rows = table().get(section, {}).items()
    values = [(name, row if isinstance(row, dict) else {"value": row}) for name, row in rows]
    missing = [
        Item(f"{dashes}{name}", tuple(row["value"].split()))
        for name, row in values
        if "with" not in row or row["with"] in around.ours
    ]
    found = [_become(item, around) for item in missing if _named(item.name, around) not in around.ours]
    # A coefficient may have gone to another flag than its row names.
    return [word for became in found if not around.ours.intersection(became.words[:1]) for word in became.words]


def _unsaid(entry: str, words: Sequence[str], around: Context) -> list[str]:
    """Decisions that another launcher makes without a flag, and ours is told by one."""
    named = [value for item in items(words) if item.name == "--prompt-data" for value in item.values]
    hub = [
        f"--prompt-data {value} names a data set on the Hub: save it as a file of rows, or with datasets.save_to_disk, "
        "and give that"
        for value in named
        if HUB_NAME.fullmatch(value) and not Path(value).suffix.startswith((".j", ".p"))
    ]
    return hub + [
        row["say"]
        for row in table()["open"].get(_launcher(entry) or "", ())
        if _loss(entry) is None and row.get("when", "") in ("", *around.rows) and not {*row["flags"]} & {*words}
    ]


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
    parts = [" ".join(as_shell(word) for word in item.words) for item in items(done.words)]
    return " \\\n    ".join([f"slime-launch {done.command}", *parts])


def as_toml(words: Sequence[str]) -> str:
    """Words of ours as a file for ``--config``; what only a shell knows is named at the end of its line."""
    known = _known([item.name for item in items(words)], typed=True)
    values: dict[str, list[str]] = {}
    for item in items(words):
        values.setdefault(item.name, []).extend(item.values)
    return "".join(_line(name, known.get(name), found) for name, found in values.items())


def _line(name: str, spec: FlagSpec | None, values: Sequence[str]) -> str:
    several = spec is not None and spec.nargs
    found = [_toml(spec, value) for value in values]
    text = "true" if not values else f"[{', '.join(found)}]" if several else found[-1]
    missing = ", ".join(unresolved(list(values)))
    note = f"  # put the value of {missing}: nothing is expanded here" if missing else ""
    return f"{name.removeprefix('--')} = {text}{note}\n"


def _toml(spec: FlagSpec | None, value: str) -> str:
    """A value in TOML: a number as one, where the flag takes one."""
    if spec is not None and spec.type in (int, float):
        with contextlib.suppress(ValueError):  # what only a shell knows, or what is refused
            number = repr(spec.type(value))
            with contextlib.suppress(tomllib.TOMLDecodeError):
                tomllib.loads(f"value = {value}")
                return value
            return number
    return json.dumps(plain(value), ensure_ascii=False)
