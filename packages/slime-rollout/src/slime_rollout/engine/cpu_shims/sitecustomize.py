"""Runs at the start of every Python process that has this directory on its PYTHONPATH: engine processes on a CPU.

Python imports one ``sitecustomize`` only, so this one then runs the one it hides, if the interpreter has its own.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import slime_cpu_shims

HERE = Path(__file__).resolve().parent


def _run_hidden_sitecustomize():
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


slime_cpu_shims.install()
_run_hidden_sitecustomize()
