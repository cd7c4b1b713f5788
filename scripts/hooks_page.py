"""Writes docs/reference/hooks.md from scripts/hooks.toml and the flag tables: every function or class of a user's.

python scripts/hooks_page.py    writes the page
"""

from __future__ import annotations

import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path

from slime_launch.flags import train_groups
from slime_megatron.service import FUNCTIONS, flag_name
from slime_rollout.hooks import HOOKS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "hooks.md"
WIDTH = 120
HEAD = """\
# Hooks

Written by `scripts/hooks_page.py` from `scripts/hooks.toml` and the flag tables; a test compares the two. A hook is a
function or class of your own that a flag names by its path: `pkg.mod.fn`, `pkg.mod:fn` or `file.py:fn`. Every hook is
found, and its arguments are checked, before a run starts. Modules that are not installed are looked for in the folder
in which the command is given.

`args` has every flag by its name, such as `args.max_turns`, and cannot be changed. Parameters of your own come from
`--custom-config-path FILE` (YAML or JSON): `max_calls: 3` there is `args.max_calls`.

Generate functions are `async`. Reward functions, sample hooks and functions for whole rollouts may be `async` or plain;
all others are plain. Data sources, sample hooks, dynamic filters and the functions under "After generation" may take
`--hook-timeout` seconds a call. A hook that raises ends the run with its name; only a reward that fails
[counts as 0](../../packages/slime-rollout/docs/rewards.md#a-function-of-your-own).

[`slime-rollout check-hooks --run`](../../packages/slime-rollout/docs/hooks.md) calls those of the first three parts as
a rollout would, with a stand-in for the engine whose replies you give.
"""
NEXT = """\
## Next

- [Hooks, and testing yours before a run](../../packages/slime-rollout/docs/hooks.md)
- [All flags](flags.md)
"""


@dataclass(frozen=True)
class Row:
    """A hook of the table: its flag's field, and what the page says of it. ``also`` are further forms of arguments."""

    field: str
    part: str
    takes: str
    called: str
    returns: str
    without: str
    more: str
    kind: str = "function"
    also: tuple[str, ...] = ()

    def text(self, meaning: str) -> str:
        """Its section of the page; ``meaning`` is the flag's line of help."""
        page = Path(self.more.partition("#")[0])
        forms = [f"`{'async ' * (self.kind == 'async')}{form}`" for form in (self.takes, *self.also)]
        items = {
            "Made with" if self.kind == "class" else "Arguments": " or ".join(forms),
            "Called": self.called,
            "Returns": self.returns,
            "Without it": self.without,
            "More": f"[{page.name if page.suffix == '.py' else page.stem.capitalize()}]({self.more})",
        }
        lines = [_filled(f"- **{name}**: {said}", "  ") for name, said in items.items()]
        return "\n".join([f"### `{flag_name(self.field)}`\n", f"{meaning[0].upper()}{meaning[1:]}.\n", *lines, ""])


def _filled(text: str, indent: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def rows() -> list[Row]:
    """The table. Raises ValueError if it lacks a hook of the flags, or has one that is none."""
    found = tomllib.loads((Path(__file__).parent / "hooks.toml").read_text(encoding="utf-8"))["hook"]
    table = [Row(**row | {"also": tuple(row.get("also", ()))}) for row in found]
    flags = {hook.field for hook in HOOKS} | set(FUNCTIONS)
    if difference := sorted(flags ^ {row.field for row in table}):
        raise ValueError(f"scripts/hooks.toml and the flags differ in {', '.join(difference)}")
    return table


def page() -> str:
    """The whole page."""
    meanings = {spec.dest: spec.help for group in train_groups() for spec in group.flags}
    parts, last = [HEAD], ""
    for row in rows():
        if row.part != last:
            parts.append(f"## {row.part}\n")
            last = row.part
        parts.append(row.text(meanings[row.field]))
    return "\n".join([*parts, NEXT])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
