"""Builds the site into outputs/docs and prints the page to open. Started by `scripts/docs` and by the lint environment.

Warnings are errors: a link to a page, heading or file that is not there, a page that no other leads to.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sphinx.cmd.build import build_main

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "outputs" / "docs"


def main(argv: Sequence[str]) -> int:
    """Build it; returns Sphinx's exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/docs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="follow every link, but write no page: half the time")
    builder = "dummy" if (checks := parser.parse_args(argv).check) else "html"
    state = ROOT / "outputs" / "docs-state"
    options = [f"--builder={builder}", "--fail-on-warning", "--keep-going", "--quiet"]
    code = build_main([*options, f"--conf-dir={ROOT / 'docs'}", f"--doctree-dir={state}", str(ROOT), str(SITE)])
    if code == 0:
        print("the site's pages have no broken link" if checks else f"open {SITE / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
