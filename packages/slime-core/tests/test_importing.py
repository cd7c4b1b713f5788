import gc
import importlib.util
import os
import subprocess
import sys
from importlib import metadata

import pytest

from slime_core.importing import (
    BY_US,
    SAFE_PATH,
    install_command,
    install_hint,
    keep_to_installed,
    leave_to_user,
    without_collections,
    without_packages,
)


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_again_after_an_import_that_fails(enabled):
    was = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with pytest.raises(ImportError), without_collections():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
        assert gc.get_freeze_count() > 0
    finally:
        gc.enable() if was else gc.disable()
        gc.unfreeze()


def test_a_package_is_absent_in_the_block_alone_and_stays_where_it_was_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    import json

    with without_packages("colorsys", "json"):
        with pytest.raises(ImportError):
            import colorsys
        assert sys.modules["json"] is json
    import colorsys

    assert colorsys.rgb_to_hsv(0, 0, 0) == (0, 0, 0)


def test_a_process_that_is_started_runs_nothing_of_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.delenv(SAFE_PATH, raising=False)
    monkeypatch.delenv("PYTHONPATH", raising=False)  # an empty entry there is the working folder
    (tmp_path / "json.py").write_text("print('theirs')")

    def said(code="import json"):
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout

    assert said() == "theirs\n"
    with keep_to_installed():
        assert said() == ""
        # Python's own libraries start processes by `-c`, too.
        assert said("import multiprocessing as m; m.get_context('spawn').Process(target=print).start()") == "\n"
        leave_to_user()
        assert said() == "theirs\n"
    assert SAFE_PATH not in os.environ
    monkeypatch.setenv(SAFE_PATH, "set by the user")
    with keep_to_installed():
        leave_to_user()
    assert os.environ[SAFE_PATH] == "set by the user" != BY_US


def test_a_hint_names_what_is_on_an_index_and_not_our_package(monkeypatch):
    texts = ["numpy>=1.26", "wandb>=0.19; extra == 'wandb'", 'isal>=1; python_version > "3.0" and extra == "wandb"']
    monkeypatch.setattr(metadata, "requires", lambda name: [*texts, "pytest; extra == 'test'"])
    hint = install_hint("slime-thing", "wandb")
    assert hint == install_command("wandb>=0.19", "isal>=1") and hint.endswith(" 'wandb>=0.19' 'isal>=1'")
    assert "slime" not in hint.replace(sys.executable, "")


def test_a_hint_for_a_package_that_is_not_installed_names_its_file(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert (
        install_hint("slime-thing", "wandb")
        == "install the packages of the extra wandb in slime-thing's pyproject.toml"
    )


@pytest.mark.parametrize(("pip", "usual"), [(None, "uv pip install --python {}"), ("pip", "{} -m pip install")])
def test_packages_are_installed_where_they_are_missing_with_what_is_there(pip, usual, monkeypatch, tmp_path):
    if pip is not None:
        (tmp_path / pip).touch()
    python = str(tmp_path / "python")
    assert install_command("a<2", python=python) == f"{usual.format(python)} 'a<2'"


def test_a_hint_asks_no_import_system_for_pip(monkeypatch):
    """Which would switch setuptools' own distutils off in this process."""

    def asked(name, *_):
        raise AssertionError(name)

    monkeypatch.setattr(importlib.util, "find_spec", asked)
    monkeypatch.delitem(sys.modules, "pip", raising=False)
    assert install_command("a") and "pip" not in sys.modules
