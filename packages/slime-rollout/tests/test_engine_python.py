"""A test that needs a real engine may be skipped only where nobody promised one."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def find(request):
    conftest = request.config.pluginmanager.getplugin(str(Path(__file__).with_name("conftest.py")))
    return conftest.find_engine_python


def test_the_one_that_was_named_must_be_there(find, tmp_path):
    with pytest.raises(pytest.fail.Exception, match="SLIME_ENGINE_PYTHON names /nowhere/python"):
        find("/nowhere/python", Path(sys.executable))
    assert find(sys.executable, tmp_path / "python") == sys.executable


def test_without_a_name_the_usual_one_or_a_skip_that_says_why(find, tmp_path):
    assert find(None, Path(sys.executable)) == sys.executable
    with pytest.raises(pytest.skip.Exception, match="no engine interpreter at"):
        find(None, tmp_path / "python")
