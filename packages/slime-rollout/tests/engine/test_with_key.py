"""A server's module that is run with its key."""

import os
import subprocess
import sys

from slime_rollout.engine.server import (
    key_environment,
    module_words,
)

MODULE = """
import logging, os, sys
print(sys.argv[1:], "SLIME_API_KEY" in os.environ, __name__)
logging.basicConfig(format="%(message)s", stream=sys.stdout)
logging.warning("settings: %s", {"api_key": sys.argv[-1]})
"""


def test_a_server_gets_its_key_and_its_log_does_not(tmp_path):
    modules, work = tmp_path / "modules", tmp_path / "work"
    for folder, code in ((modules, MODULE), (work, "raise ZeroDivisionError")):
        folder.mkdir()
        (folder / "server.py").write_text(code)  # slime_rollout.engine has a module of this name, too
    (work / "logging.py").write_text("raise ZeroDivisionError")
    command = [sys.executable, *module_words("server", "k" * 20), "--port", "1"]
    environment = {**os.environ, **key_environment("k" * 20), "PYTHONPATH": str(modules)}
    done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, check=True)
    words, log = done.stdout.splitlines()
    assert words == f"['--port', '1', '--api-key={'k' * 20}'] False __main__"
    assert log == "settings: {'api_key': '--api-key=[removed]'}"
