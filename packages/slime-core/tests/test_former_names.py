"""Names of earlier versions: what was renamed works and warns, of the rest the error says what there is now."""

import importlib
import re
import sys
import warnings

import pytest
import torch

import slime_core
from slime_core import ops
from slime_core.former_names import RENAMED, REPLACED, former_attribute, moved_modules, renamed


def found(path):
    """What a dotted path names: the longest part that is a module, and attributes of it."""
    home, _, name = path.rpartition(".")
    return getattr(importlib.import_module(home), name)


@pytest.mark.parametrize(("module", "name", "now"), [(m, *row) for m, rows in RENAMED.items() for row in rows.items()])
def test_a_renamed_name_is_the_new_one_and_says_so(module, name, now):
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{name} is now {re.escape(now)}; .* next release") as said:
        assert getattr(importlib.import_module(module), name) is found(now)
    assert said[0].filename == __file__


@pytest.mark.parametrize(
    ("module", "name", "instead"), [(m, *row) for m, rows in REPLACED.items() for row in rows.items()]
)
def test_a_name_that_went_says_what_to_use(module, name, instead):
    with pytest.raises(AttributeError, match=re.escape(f"{name!r}; it was there in an earlier version, use {instead}")):
        getattr(importlib.import_module(module), name)
    for path in re.findall(r"slime_core(?:\.\w+)+", instead):
        if path.count(".") == 1:
            assert importlib.import_module(path)
        else:
            assert found(path) is not None


def test_the_old_loss_computes_what_the_new_one_does():
    rows = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]), torch.tensor([1.0, -1.0])
    with pytest.warns(DeprecationWarning):
        old = ops.policy_loss
    assert old(*rows, 0.2, 0.2)[0].tolist() == ops.policy_token_loss(*rows, 0.2, 0.2)[0].tolist()


def test_a_moved_module_is_the_same_one_and_says_so(tmp_path, monkeypatch):
    (tmp_path / "house" / "room").mkdir(parents=True)
    (tmp_path / "house" / "__init__.py").touch()
    (tmp_path / "house" / "room" / "new.py").write_text("value = object()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    moved_modules("house", {"old": "room.new"})
    with pytest.warns(DeprecationWarning, match=r"house\.old is now house\.room\.new; .* next release") as said:
        from house.old import value
    from house import old
    from house.room import new

    assert said[0].filename == __file__
    assert old is new
    assert value is new.value
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'house\.other'"):
        importlib.import_module("house.other")


def test_a_name_that_left_a_module_is_the_same_one_and_says_so(monkeypatch):
    left = renamed("slime_core.words", {"old": "slime_core.ops.gae_advantages"}, {"older": "a list"})
    monkeypatch.setattr(slime_core.words, "__getattr__", left, raising=False)
    with pytest.warns(DeprecationWarning, match=r"slime_core\.words\.old is now slime_core\.ops\.gae_a\w+; ") as said:
        from slime_core.words import old
    assert said[0].filename == __file__
    assert old is ops.gae_advantages
    with pytest.raises(AttributeError, match=r"no attribute 'older'; it was there in an earlier version, use a list$"):
        slime_core.words.older  # noqa: B018
    with pytest.raises(AttributeError, match=r"module 'slime_core\.words' has no attribute 'other'$"):
        slime_core.words.other  # noqa: B018


def test_other_names_are_unknown_as_everywhere_and_nothing_else_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for module in (slime_core, ops):
            with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
                module.nothing  # noqa: B018
            assert not hasattr(module, "__wrapped__")
        assert all(getattr(ops, name) is not None for name in ops.__all__)


def test_an_attribute_that_was_renamed_is_the_same_one_and_says_so():
    class House:
        doors = 2
        gates = former_attribute("gates", "doors")

    with pytest.warns(DeprecationWarning, match=r"^House\.gates is now doors; .* next release$") as said:
        assert House().gates == 2
    assert said[0].filename == __file__
