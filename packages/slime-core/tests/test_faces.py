import sys
from types import ModuleType

import pytest

import slime_core.types
from slime_core import sums
from slime_core.faces import face
from slime_core.types import kept


def test_a_face_gives_names_of_other_modules_each_when_it_is_asked_for(monkeypatch):
    module = ModuleType("slime_core.shown")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.__all__, module.__getattr__, module.__dir__ = face(
        module.__name__, {"types.kept": "kept_text is_kept", "sums": "shard_sum"}
    )
    assert module.__all__ == ["is_kept", "kept_text", "shard_sum"]
    assert {"__name__", *module.__all__} <= set(dir(module))
    assert module.is_kept is kept.is_kept
    assert module.shard_sum is sums.shard_sum
    assert vars(module)["shard_sum"] is sums.shard_sum  # found at once from now on
    assert "kept_text" not in vars(module)
    with pytest.raises(AttributeError, match=r"module 'slime_core\.shown' has no attribute 'nothing'; it has "):
        module.nothing  # noqa: B018


def test_the_types_have_a_face():
    for name in slime_core.types.__all__:
        assert getattr(slime_core.types, name) is not None
