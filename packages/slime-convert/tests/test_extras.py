"""Advice where a package of an extra is missing, as slime-core gives it."""

import sys
from importlib import metadata

import pytest

from slime_convert.extras import install_hint


@pytest.mark.parametrize("extra", ["gguf", "check"])
def test_a_hint_names_what_the_extra_adds(extra):
    words = install_hint("slime-convert", extra).replace(sys.executable, "PYTHON")
    assert "slime" not in words and "transformers" in words
    assert ("gguf" in words, "megatron-core" in words) == (extra == "gguf", extra == "check")


def test_a_checkout_that_is_not_installed_names_its_file(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert "pyproject.toml" in install_hint("slime-convert", "gguf")


@pytest.mark.parametrize(("pip", "usual"), [(None, "uv pip install --python {}"), ("pip", "{} -m pip install")])
def test_the_command_is_for_the_running_interpreter(pip, usual, monkeypatch, tmp_path):
    if pip is not None:
        (tmp_path / pip).touch()
    python = str(tmp_path / "python")
    monkeypatch.setattr(sys, "executable", python)
    assert install_hint("slime-convert", "gguf").startswith(usual.format(python))
