import re
import sys
from pathlib import Path

import pytest

from slime_rollout.engine.interpreter import find_package
from slime_rollout.engine.server import importable_in


def test_where_a_package_is():
    assert find_package(sys.executable, "pytest") == Path(pytest.__file__).parent
    assert find_package(sys.executable, "no_such_package") is None
    assert importable_in(sys.executable, "pytest")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no program", "does not run as a Python interpreter: .*Exec format error"),
        ("#!/bin/sh\necho broken >&2\nexit 3\n", "ended with exit code 3: broken"),
    ],
)
def test_something_that_is_no_interpreter(tmp_path, caplog, text, words):
    python = tmp_path / "python"
    python.write_text(text)
    python.chmod(0o755)
    assert find_package(str(python), "sglang") is None
    assert re.search(words, caplog.text)
