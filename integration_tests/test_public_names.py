"""Each public name of the last release is still there; a new name is said by a warning, a replacement by the error.

What the last release had was written down by `scripts/public_names.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import public_names

ROOT = Path(__file__).resolve().parents[1]
RECORDS = {path.parents[2].name: path for path in sorted(ROOT.glob(f"packages/*/{public_names.RECORD}"))}
SAID = re.compile(r"(?P<was>[\w.]+) is now (?P<now>[\w.]+); the old name goes with the next release")


@dataclass
class Found:
    """An object, and what warnings said of former names on the way to it."""

    it: Any
    said: list[re.Match[str]]


def look(get: Callable[[], Any]) -> Found:
    """Call a function, and keep the warnings about former names."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        it = get()
    return Found(it, [match for one in caught if (match := SAID.fullmatch(str(one.message)))])


def problems(module: str, names: set[str]) -> Iterator[str]:
    """Names of a module that are gone without a word, or whose warning leads to another object."""
    before = sys.modules.get(module)
    if before is not None and before.__name__ != module:
        del sys.modules[module]  # so that an import under the former name warns again
    try:
        home = look(lambda: importlib.import_module(module))
    except ImportError as error:
        yield f"{module}: {error}"
        return
    yield from misleading(home)
    if home.it.__name__ != module and not home.said:
        yield f"{module} is {home.it.__name__} now, and no warning says so"
    for name in sorted(names):
        try:
            yield from misleading(look(lambda: attribute(home.it, name)))  # noqa: B023  (called at once)
        except AttributeError as error:
            if "; it was there in an earlier version, use " not in str(error):
                yield f"{module}.{name}: {error}"


def attribute(module: ModuleType, name: str) -> Any:
    """An attribute of a module, or a module below it."""
    try:
        return getattr(module, name)
    except AttributeError:
        if not hasattr(module, "__path__") or importlib.util.find_spec(f"{module.__name__}.{name}") is None:
            raise
        return importlib.import_module(f"{module.__name__}.{name}")


def misleading(found: Found) -> Iterator[str]:
    """Warnings that name another object, or nothing."""
    for match in found.said:
        home, _, name = match["now"].rpartition(".")
        try:
            now = attribute(importlib.import_module(home), name)
        except (ImportError, AttributeError) as error:
            yield f"{match[0]}: {error}"
        else:
            if now is not found.it:
                yield f"{match['was']} is another object than {match['now']}, which its warning names"


def test_each_package_has_a_record() -> None:
    assert list(RECORDS) == sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))


@pytest.mark.parametrize("package", RECORDS)
def test_public_names_of_the_last_release_are_there(package: str) -> None:
    names = public_names.read(RECORDS[package])
    found = [line for module in names for line in problems(module, names[module])]
    assert not found, f"{len(found)} of {sum(map(len, names.values()))} names:\n" + "\n".join(found)


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two modules: the first gave a name to the second, and dropped another without a word."""
    (tmp_path / "old_room.py").write_text(
        "import new_room\nfrom slime_core.former_names import renamed\nstays = 1\n"
        "__getattr__ = renamed(__name__, {'moved': 'new_room.now', 'astray': 'new_room.nowhere'}, {'older': 'now'})\n"
    )
    (tmp_path / "new_room.py").write_text("now = object()\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("old_room", "new_room"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("house")
def test_a_public_name_that_went_without_a_word_is_found() -> None:
    assert list(problems("old_room", {"stays", "moved", "older"})) == []
    assert list(problems("old_room", {"gone"})) == ["old_room.gone: module 'old_room' has no attribute 'gone'"]
    assert list(problems("old_room", {"astray"})) == ["old_room.astray: module 'new_room' has no attribute 'nowhere'"]
    [said] = problems("no_room", {"name"})
    assert said == "no_room: No module named 'no_room'"


TREE = {
    "docs/conf.py": 'PUBLIC = {"toy": "paged rooms.*"}\n',
    "docs/page.md": "```python\nfrom slime_toy.hidden import (\n    shown,  # and why\n    other as mine,\n)\n```\n",
    "packages/slime-toy/pyproject.toml": '[project]\nname = "slime-toy"\nversion = "0.3.0"\n',
    "packages/slime-toy/src/slime_toy/__init__.py": "__all__ = sorted({'late', 'early'})\n",
    "packages/slime-toy/src/slime_toy/paged.py": "import os\nLIMIT: int = 1\n_own = first, second = 1, 2\n"
    "T = TypeVar('T')\nclass Thing:\n    inner = 1\ndef make(): ...\ndef _made(): ...\n",
    "packages/slime-toy/src/slime_toy/hidden.py": "shown = other = unseen = 1\n",
    "packages/slime-below/src/slime_below.py": "def of(module):\n    return ['asked'], None\n",
    "packages/slime-toy/src/slime_toy/lazy.py": "if 0: ...\nelse:\n    from slime_below import of\n"
    "    __all__, __dir__ = of(__name__)\n",
    "packages/slime-toy/src/slime_toy/rooms/__init__.py": "",
    "packages/slime-toy/src/slime_toy/rooms/one.py": "def enter(): ...\n",
}


def test_what_is_public_is_written_down(tmp_path: Path) -> None:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    path = public_names.write(tmp_path, "slime-toy", tmp_path)
    assert path.read_text().startswith("# Public names of slime-toy 0.3.0, by module.")
    assert public_names.read(path) == {
        "slime_toy": {"early", "late"},
        "slime_toy.hidden": {"shown", "other"},
        "slime_toy.lazy": {"asked"},
        "slime_toy.paged": {"LIMIT", "Thing", "first", "make", "second"},
        "slime_toy.rooms.one": {"enter"},
    }
