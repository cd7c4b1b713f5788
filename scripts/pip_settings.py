"""Prints what pip was told about packages and certificates as shell `export` lines for uv, which does not read it.

pip's settings come from its files and from PIP_* variables alike; a variable that uv has been given already wins.
"""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping

# pip's name and uv's variable. Without pip's extra-index-url: uv would take whatever it lists from there alone.
PASSED_ON = {"index-url": "UV_DEFAULT_INDEX", "find-links": "UV_FIND_LINKS", "cert": "SSL_CERT_FILE"}
# The later, the stronger, as in pip itself.
SECTIONS = ("global.", "install.", ":env:.")


def parse_settings(listing: str) -> dict[str, str]:
    """Read the output of `pip config list`, whose lines are such as `global.index-url='https://…'`."""
    found: dict[str, str] = {}
    for section in SECTIONS:
        for line in listing.splitlines():
            name, separator, value = line.partition("=")
            if separator and name.startswith(section):
                found[name.removeprefix(section)] = str(ast.literal_eval(value))
    return found


def exports(settings: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """The `export` lines.

    Args:
        settings: pip's, by name.
        environment: What is set already.
    """
    lines = []
    for name, variable in PASSED_ON.items():
        value = settings.get(name, "").strip()
        if name == "find-links":
            # pip separates several places by white space, uv by commas.
            value = ",".join(value.split())
        if value and not environment.get(variable):
            lines.append(f"export {variable}={shlex.quote(value)}")
    return lines


def main() -> int:
    """Ask the pip of this interpreter."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    print("\n".join(exports(parse_settings(listing), os.environ)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
