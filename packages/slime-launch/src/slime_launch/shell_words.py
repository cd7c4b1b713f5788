"""The command that a shell script runs, found by reading the script; nothing of it is run.

Assignments, arrays, ``${X}``, ``"${X[@]}"``, ``${X:-default}``, comments, line continuations and ``source`` of files
near the script are followed. What only exists when a script runs, such as ``$(nproc)``, stays as it is written; a
dollar that the script's quotes make a letter is `DOLLAR`, until :func:`plain`.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from slime_core.errors import ConfigError, DataError
from slime_core.files import MOST_WRITTEN, read_text

ENTRIES = ("train.py", "train_async.py", "slime-launch")
MODULES = (
    *("verl.trainer.main_ppo", "verl.trainer.fsdp_sft_trainer", "trl"),
    *(f"openrlhf.cli.train_{kind}" for kind in ("ppo_ray", "sft", "dpo", "rm")),
)
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*|\d+)(\[[@*]\])?(?:(:?[-=])([^}]*))?\}|([A-Za-z_]\w*|\d))")
POSITIONAL = re.compile(r"\$(?:[@*]|\{[@*][^}]*\})")
"""The arguments that the script is called with."""
DOLLAR, BACKTICK = "\ue024", "\ue060"
"""A dollar and a backtick that stand for themselves, which no shell may expand."""
LITERAL = str.maketrans({"$": DOLLAR, "`": BACKTICK})
SUBSTITUTION = re.compile(r"\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`")
SEQUENCE = re.compile(r"\$\(seq((?: -?\d+){1,3})\)")
BREAKS = {";", "&&", "||", "|", "&", "(", ")", "{", "}", "then", "do", "else", "fi", "done"}


@dataclass
class _Reader:
    """A script as far as it was read: variables, the words of each command, and the arrays that nothing assigned."""

    directory: Path | None
    values: dict[str, list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    unset: list[str] = field(default_factory=list)

    def read(self, text: str) -> None:
        for line in _logical_lines(text):
            for words in _split(line):
                self._statement(words)

    def _statement(self, words: list[str]) -> None:
        while words and words[0] in ("export", "local", "declare", "readonly"):
            words = words[1:]
        while words and (match := ASSIGNMENT.fullmatch(words[0])):
            name, adds, value = match.groups()
            if value == "(":
                end = words.index(")") if ")" in words else len(words)
                found = [part for word in words[1:end] for part in self.expanded(word)]
                words = words[end + 1 :]
            else:
                found, words = self.expanded(value), words[1:]
            self.values[name] = [*self.values.get(name, []), *found] if adds else found
        if not words:
            return
        if words[0] in ("source", ".") and len(words) > 1:
            self._source(" ".join(self.expanded(words[1])))
            return
        self.commands.append([part for word in words for part in self.expanded(word)])

    def _source(self, path: str) -> None:
        if self.directory is None:
            return
        above = (self.directory, *self.directory.parents[:2])  # scripts are run from the root of their repository
        for place in (*(folder / path for folder in above), self.directory / "models" / Path(path).name):
            with contextlib.suppress(OSError, ValueError, DataError):  # its variables are unknown then
                if place.is_file():
                    self.read(read_text(place, most=MOST_WRITTEN))
                    return

    def expanded(self, word: str) -> list[str]:
        """A raw word's values: several for an array or an unquoted variable, none for an empty one."""
        if sequence := SEQUENCE.fullmatch(word):
            return _sequence([int(number) for number in sequence[1].split()])
        whole = VARIABLE.fullmatch(word.strip('"'))
        if whole and not word.startswith("'"):
            values = self._value(whole)
            if values is None and whole[2]:
                self.unset.append(whole[1])
                return []
            if values is not None:
                is_array = whole[2] == "[@]"
                quoted = word.startswith('"')
                return values if is_array and quoted else [part for value in values for part in _fields(value, quoted)]
        return ["".join(self._parts(word))]

    def _parts(self, word: str) -> Iterator[str]:
        """A word without its quotes, variables filled in except within single quotes."""
        for match in re.finditer(r"'([^']*)'|\"((?:[^\"\\]|\\.)*)\"|\\(.)|([^'\"\\]+)", word, re.DOTALL):
            single, double, escaped, plain = match.groups()
            if single is not None:
                yield single.translate(LITERAL)
            elif escaped is not None:
                yield escaped.translate(LITERAL)
            elif double is not None:
                text = re.sub(r"\\([\"\\$`])", lambda found: found[1].translate(LITERAL), double)
                yield VARIABLE.sub(self._filled, text)
            else:
                yield VARIABLE.sub(self._filled, plain)

    def _filled(self, match: re.Match[str]) -> str:
        values = self._value(match)
        return match[0] if values is None else " ".join(values)

    def _value(self, match: re.Match[str]) -> list[str] | None:
        """A variable's value, also its default; ``None`` if it is not known."""
        name, default = match[1] or match[5], match[4]
        if name in self.values and (self.values[name] or default is None):
            return self.values[name]
        if default is not None:
            return ["".join(self._parts(default))]
        return None


class TrainCommand(NamedTuple):
    """The training command of a script.

    Attributes:
        entry: ``train.py``, ``train_async.py``, ``trl grpo``, ``verl.trainer.main_ppo`` …; empty before a flag.
        words: The words after it.
        unset: Arrays in it that no file that was read assigns; they are left out.
    """

    entry: str
    words: list[str]
    unset: list[str]


def read_command(text: str, directory: Path | None) -> TrainCommand:
    """The training command of a script or of a single command line; the last one, if there are several.

    Args:
        text: The script, or the words of one command.
        directory: The script's, near which ``source`` looks for files; without one nothing is read.

    Raises:
        ConfigError: No such command is in it.
    """
    reader = _Reader(directory)
    reader.read(text)
    found = [entry for words in reader.commands if (entry := _entry(words)) is not None]
    if not found:
        raise ConfigError(
            "no training command found: it must run train.py, train_async.py, slime-launch, trl or verl, or begin "
            "with a flag"
        )
    return TrainCommand(*found[-1], list(dict.fromkeys(reader.unset)))


def _entry(words: list[str]) -> tuple[str, list[str]] | None:
    for place, word in enumerate(words):
        name = Path(word).name
        if name in ENTRIES or word in MODULES or re.fullmatch(r"(grpo|sft|dpo|reward|rloo)(_\w+)?\.py", name):
            rest = words[place + 1 :]
            if name in ("slime-launch", "trl") and rest and not rest[0].startswith("-"):
                name, rest = f"{name} {rest[0]}", rest[1:]
            return name if name != word or "." not in word else word, rest
    if words and (words[0].startswith("--") or re.match(r"\+{0,2}[a-z_]+\.[a-z_.0-9]+=", words[0])):
        return "", words
    return None


def _logical_lines(text: str) -> Iterator[str]:
    """Lines with their continuations, arrays and open quotes joined; of here-documents only what `read` names."""
    held, open_array, until, name = "", False, "", ""
    document: list[str] = []
    for raw in text.splitlines():
        if until:
            if raw.strip() != until:
                document.append(raw.removesuffix("\\"))
                continue
            if name:
                escaped = re.sub(r'(["`])', r"\\\1", " ".join(document))
                yield f'{name}="{escaped}"'
            until, document = "", []
            continue
        line = _without_comment(raw, held)
        if match := re.search(r"<<-?\s*['\"]?(\w+)['\"]?", line):
            until, line = match[1], line[: match.start()]
            read = re.fullmatch(r"\s*read\b.*?(\w+)\s*", line)  # `read -r -d '' NAME <<EOF`
            name = read[1] if read else ""
        if line.rstrip().endswith("\\") and _is_closed(held + line):
            held += line.rstrip()[:-1] + " "
            continue
        whole = held + line
        open_array = _has_open_array(whole)
        if open_array or not _is_closed(whole):
            held = whole + ("\n" if not open_array else " ")
            continue
        held = ""
        yield whole
    if held.strip():
        yield held


def _has_open_array(text: str) -> bool:
    """Whether the last array that begins in the text goes on after it."""
    *_, start = [None, *re.finditer(r"(?<!\S)\w+\+?=\(", text)]
    return start is not None and ")" not in _tokens(text[start.end() :])


def _is_closed(text: str) -> bool:
    """Whether no quote is open at the end."""
    quote = ""
    skip = False
    for letter in text:
        if skip:
            skip = False
        elif letter == "\\" and quote != "'":
            skip = True
        elif quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
    return not quote


def _without_comment(line: str, held: str) -> str:
    if not _is_closed(held):
        return line
    quote = ""
    for place, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and (place == 0 or line[place - 1].isspace()):
            return line[:place]
    return line


def _tokens(text: str) -> list[str]:
    """Raw words, quotes kept, and the shell's operators."""
    pattern = (
        r"""(?:\$\((?:[^()]|\([^()]*\))*\)|\$\{[^}]*\}|'[^']*'|"(?:[^"\\]|\\.)*"|\\.|[^\s'"\\;&|()])+|&&|\|\||[;&|()]"""
    )
    return re.findall(pattern, text, re.DOTALL)


def _split(line: str) -> Iterator[list[str]]:
    """The statements of a logical line, as raw words; an array's words end with ``)``."""
    words: list[str] = []
    in_array = False
    for token in _tokens(line):
        if token == "(" and words and words[-1].endswith("=") and ASSIGNMENT.fullmatch(words[-1]):
            words[-1] += "("
            in_array = True
        elif in_array:
            words.append(token)
            in_array = token != ")"
        elif token in BREAKS:
            if words:
                yield words
            words = []
        else:
            words.append(token)
    if words:
        yield words


def _fields(value: str, quoted: bool) -> list[str]:
    if quoted or SUBSTITUTION.search(value):
        return [value]
    try:
        return shlex.split(value)
    except ValueError:
        return value.split()


def _sequence(numbers: list[int]) -> list[str]:
    """The numbers that ``seq LAST``, ``seq FIRST LAST`` or ``seq FIRST STEP LAST`` prints."""
    first = numbers[0] if len(numbers) > 1 else 1
    step = numbers[1] if len(numbers) > 2 else 1
    return [str(number) for number in range(first, numbers[-1] + (1 if step > 0 else -1), step or 1)]


def plain(text: str) -> str:
    """A word as it is meant, with dollars for `DOLLAR`."""
    return text.translate({ord(DOLLAR): "$", ord(BACKTICK): "`"})


def as_shell(word: str) -> str:
    """A word as a shell takes it; variables and substitutions in it stay what they are."""
    forms = [match for form in (SUBSTITUTION, VARIABLE) for match in form.finditer(word)]
    if not forms:
        return shlex.quote(plain(word))
    parts, end = [], 0
    for match in sorted(forms, key=lambda match: match.start()):
        if match.start() >= end:
            parts += [_in_double_quotes(word[end : match.start()]), match[0]]
            end = match.end()
    return f'"{"".join(parts)}{_in_double_quotes(word[end:])}"'


def _in_double_quotes(text: str) -> str:
    return re.sub(r'(["\\$`])', r"\\\1", plain(text))


def unresolved(words: list[str]) -> list[str]:
    """Variables and substitutions that are left in the words: what only exists when the script runs."""
    return sorted({match[0] for word in words for form in (SUBSTITUTION, VARIABLE) for match in form.finditer(word)})
