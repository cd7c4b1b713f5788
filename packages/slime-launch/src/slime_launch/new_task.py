"""``slime-launch recipes`` and ``slime-launch new``: the recipes that come with the package, and a copy to change.

They are the folders of the repository's `examples/` that have a README.md and a run.toml. Here they are seen through
the link `recipes`, which a wheel has as a folder.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.config import DATA_LOSSES
from slime_core.files import whole_file
from slime_launch.errors import RecipeError
from slime_launch.parser import WordsParser

RECIPES = Path(__file__).parent / "recipes"
DEFAULT = "own-reward"
README, RUN, LAPTOP = "README.md", "run.toml", "laptop.toml"
HOOK_SETTINGS = (
    *("prompt-data", "input-key", "label-key", "metadata-key", "tool-key", "apply-chat-template"),
    *("custom-config-path", "custom-rm-kwargs", "reward-key", "group-rm", "max-turns"),
)
"""The settings of a run file that `check-hooks` is given, besides the hooks."""

Flags = Mapping[str, Any]
"""The values of a run file, by the flags' names without dashes in front."""


@dataclass(frozen=True)
class RecipeFolder:
    """A folder with a README.md and a run.toml."""

    folder: Path

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def title(self) -> str:
        """First heading of its README."""
        lines = (self.folder / README).read_text(encoding="utf-8").splitlines()
        return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), "")

    @property
    def where(self) -> str:
        """The machines that it runs on, such as `laptop; 8 GPUs, colocated`."""
        laptop = "laptop; " if (self.folder / LAPTOP).exists() else ""
        return laptop + gpus(run_flags(self.folder / RUN))

    def files(self) -> Iterator[Path]:
        """Its files, relative to the folder."""
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(self.folder)


def recipes(argv: list[str]) -> int:
    """Print every recipe: name, what it runs on, title."""
    parser = WordsParser(prog="slime-launch recipes", description="List the recipes that `slime-launch new` can copy.")
    parser.parse_args(argv)
    rows = [(recipe.name, recipe.where, recipe.title) for recipe in find_recipes().values()]
    name_width, where_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, where, title in rows:
        print(f"{name:<{name_width}}  {where:<{where_width}}  {title}")
    print(f"\na copy to change:  slime-launch new NAME --from RECIPE   ({DEFAULT} unless given)")
    return 0


def new(argv: list[str]) -> int:
    """Copy a recipe, and print what to do with it.

    Raises:
        RecipeError: There is no such recipe, or ``NAME`` exists already.
    """
    parser = WordsParser(
        prog="slime-launch new",
        description="Copy a recipe into a new folder, with its own paths in it, and say what to do next.",
    )
    parser.add_argument("name", metavar="NAME", help="the new folder; a path may stand before its name")
    parser.add_argument("--from", dest="recipe", metavar="RECIPE", default=DEFAULT, help=f"[{DEFAULT}]")
    given = parser.parse_args(argv)
    recipe, target = find_recipe(given.recipe), Path(given.name)
    written = copy_recipe(recipe, target)
    print(f"wrote {target}, from the recipe {recipe.name}: {recipe.title}")
    print("\n".join(f"    {path}" for path in written))
    print("\n".join(next_steps(target)))
    return 0


def find_recipes() -> dict[str, RecipeFolder]:
    """Every recipe by its name.

    Raises:
        RecipeError: There are none, as in an installation from a part of the repository.
    """
    found = {
        path.parent.name: RecipeFolder(path.parent)
        for path in sorted(RECIPES.glob(f"*/{RUN}"))
        if (path.parent / README).is_file()
    }
    if not found:
        raise RecipeError(f"{RECIPES} holds no recipes; install slime-launch from a whole clone, or from its wheel")
    return found


def find_recipe(name: str) -> RecipeFolder:
    """The recipe of a name. Raises RecipeError if there is none."""
    found = find_recipes()
    if name not in found:
        near = difflib.get_close_matches(name, found, n=3, cutoff=0.5)
        meant = f"did you mean {', '.join(near)}? " if near else ""
        raise RecipeError(f"there is no recipe {name}; {meant}`slime-launch recipes` lists all {len(found)}")
    return found[name]


def copy_recipe(recipe: RecipeFolder, target: Path) -> list[Path]:
    """Write a recipe's files to ``target``, with its paths in place of the recipe's; returns what was written.

    Raises:
        RecipeError: ``target`` exists, or its name cannot stand in a run file and a command as it is.
    """
    if not re.fullmatch(r"[\w./~+-]*\w", str(target)) or str(target).startswith("-"):
        raise RecipeError(f"the name {target} must consist of letters, digits, and . _ - /")
    if target.exists():
        raise RecipeError(f"{target} exists already; give a new name, or remove it")
    written = []
    for path in recipe.files():
        place, content = target / path, (recipe.folder / path).read_bytes()
        place.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(place) as partial:
            partial.write_bytes(_renamed(content, recipe, target))
            partial.chmod((recipe.folder / path).stat().st_mode & 0o777)
        written.append(place)
    return written


def next_steps(folder: Path) -> list[str]:
    """The commands for a copy, in their order, with what one will see."""
    shortest = run_flags(folder / (LAPTOP if (folder / LAPTOP).exists() else RUN))
    steps: list[tuple[str, list[str]]] = []
    if checking := check_hooks_words(shortest):
        what = "Check its functions without a model or GPU: `ok` and what they gave for this reply, or `wrong` and why"
        steps.append((what, [shlex.join(checking)]))
    if (folder / LAPTOP).exists():
        needs = [str(path) for path in (shortest.get("hf-checkpoint"), shortest.get("sglang-python")) if path]
        missing = [path for path in needs if not Path(path).exists()]
        note = f" (it needs {' and '.join(missing)}; scripts/quickstart makes them)" if missing else ""
        steps.append(("See what the laptop's run will do and need", [f"slime-launch plan --config {folder / LAPTOP}"]))
        what = f"Run it on this machine: texts and their rewards, a line for each step, a curve at the end{note}"
        steps.append((what, [f"slime-launch train --config {folder / LAPTOP}"]))
    node = f"--config {folder / RUN}"
    what = f"On a cluster or GPU node ({gpus(run_flags(folder / RUN))}): set its paths in {folder / RUN}, then"
    steps.append((what, [f"slime-launch plan {node} --device h100", f"slime-launch train {node}"]))
    lines = []
    for number, (what, commands) in enumerate(steps, 1):
        lines += ["", f"{number}. {what}", *(f"    {command}" for command in commands)]
    return [*lines, "", f"{folder / README} says what is in which file."]


def check_hooks_words(flags: Flags) -> list[str]:
    """The `slime-rollout check-hooks` that calls the functions of a run file; none where it has no functions."""
    from slime_rollout.checks import HOOKS

    hooks = [hook.flag.removeprefix("--") for hook in HOOKS if hook.flag.removeprefix("--") in flags]
    if not hooks:
        return []
    words = ["slime-rollout", "check-hooks", "--run"]
    for name in (*hooks, *HOOK_SETTINGS):
        value = flags.get(name, False)
        if value is not False:
            values = [] if value is True else value if isinstance(value, list) else [value]
            words += [f"--{name}", *map(str, values)]
    return [*words, "--reply", "The sun is a big hot ball."]


def run_flags(path: Path) -> Flags:
    """The values of a run file.

    Raises:
        RecipeError: It is not TOML.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} cannot be read: {error}") from error
    return {name.removeprefix("--").replace("_", "-"): value for name, value in content.items()}


def gpus(flags: Flags) -> str:
    """How many GPUs a run file asks for, such as `16 GPUs` or `8 GPUs, colocated`."""
    trainers = flags.get("actor-num-nodes", 1) * flags.get("actor-num-gpus-per-node", 1)
    engines = 0 if flags.get("loss-type") in DATA_LOSSES else flags.get("rollout-num-gpus", 0)
    is_shared = flags.get("colocate", False)
    total = max(trainers, engines) if is_shared else trainers + engines
    return f"{total} GPU{'s' if total > 1 else ''}{', colocated' if is_shared else ''}"


def _renamed(content: bytes, recipe: RecipeFolder, target: Path) -> bytes:
    """A file's content with the copy's paths; what is not text stays as it is."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return content
    for old, path in ((f"examples/{recipe.name}", str(target)), (f"runs/{recipe.name}", f"runs/{target.name}")):
        text = re.sub(rf"(?<![\w-]){re.escape(old)}(?![\w-])", path, text)
    return re.sub(r"\]\((\.\./[^)#]+)", lambda link: _relinked(link, recipe.folder, target), text).encode()


def _relinked(link: re.Match[str], folder: Path, target: Path) -> str:
    """A README's link out of its folder, as it is from the copy."""
    linked = folder.resolve() / link[1]
    return f"]({os.path.relpath(linked, target.resolve())}" if linked.exists() else link[0]
