"""Writes docs/reference/flags.md from the flag tables: ours by group, and what becomes of those of other launchers.

python scripts/flags_page.py    writes the page
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from slime_launch.answers import OTHERS, UPSTREAM, Answer, foreign_answer, table, upstream_answer
from slime_launch.flags import train_groups
from slime_launch.parser import help_line

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "flags.md"
HEAD = """\
# Flags

Written by `scripts/flags_page.py` from the flag tables; a test compares the two. `slime-launch train --help` shows the
same, and `slime-launch train --help-sglang` the flags of the installed SGLang (`--sglang-…`).

What a flag **needs** stands in its row: `needs --use-kl-loss`. Given without, it would have no effect, and the command
is refused in a line that names both; so is a flag of training that `--loss-type` does not look at. Where nothing is
lost, a line at the start says so and the run goes on: the value asks for nothing (0, or the default), what it asks for
is so anyway (`--kl-loss-type` where there is no KL), or one more flag has made another kind of run of the command
(`--debug-rollout-only`, `--load-debug-rollout-data`, `--num-rollout 0`).
"""
THEIRS = """\
## Flags of other launchers

`slime-launch migrate SCRIPT` reads a command with these and writes ours. Flags of upstream slime that are not here and
not refused are the same. Those with no effect are accepted.
"""
PASSED_ON = {"--moe-aux-loss-coeff", "--optimizer-cpu-offload", "--sglang-mem-fraction-static"}
"""Flags of Megatron and SGLang that the tables name; our own groups have them only where they are typed."""
TITLES = {"openrlhf": "OpenRLHF, by its names since 0.10", "trl": "TRL and Transformers", "verl": "verl"}


def page() -> str:
    """The whole page."""
    groups = train_groups()
    known = {spec.name for group in groups for spec in group.flags}
    specs = {spec.dest: spec for group in groups for spec in group.flags}
    parts = [HEAD]
    for group in groups:
        rows = [(f"`{spec.name}`", help_line(spec, specs)) for spec in group.flags]
        note = f"\n{group.description}\n" if group.description else ""
        parts.append(f"## {group.title[0].upper()}{group.title[1:]}\n{note}\n{_table(('flag', 'meaning'), rows)}")
    parts.append(THEIRS)
    names = sorted({f"--{name}" for section in UPSTREAM for name in table()[section]} - known)
    parts.append(f"### Upstream slime\n\n{_table(('flag', 'here'), _answers(names, known))}")
    for section in OTHERS:
        dashes = "" if section == "verl" else "--"
        rows = []
        for name in table()[section]:
            answer = foreign_answer(f"{dashes}{name}", known | PASSED_ON)
            rows.append((f"`{dashes}{name}`", _said(answer) if answer is not None else ""))
        parts.append(f"### {TITLES[section]}\n\n{_table(('flag', 'here'), rows)}")
    return "\n".join(parts)


def _answers(names: Iterable[str], known: set[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        answer = upstream_answer(name, known)
        if answer is not None:
            yield f"`{name}`", _said(answer)
        elif row := table()["renamed"].get(name.removeprefix("--")):
            yield f"`{name}`", f"`{row['to']}`, where the installed SGLang has it"


def _said(answer: Answer) -> str:
    if answer.to:
        second = f", `{answer.second}`" if answer.second else ""
        others = "".join(f"; with `{flag}` {f'`{to}`' if to else 'nothing'}" for flag, to in answer.beside.items())
        others += "".join(f"; `{value}`: {advice}" for value, advice in answer.instead.items())
        alone = f", with `{answer.when}` alone" if answer.when else ""
        return f"`{answer.to}{' ' + answer.value if answer.value else ''}`{second}{alone}{others}"
    return f"{answer.outcome.value}: {answer.why}"


def _table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    lines += [f"| {name} | {text.replace('|', chr(92) + '|')} |" for name, text in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
