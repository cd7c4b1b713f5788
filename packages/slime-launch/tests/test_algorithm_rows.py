"""A built-in loss and an estimator are a function and a row: nothing else knows them by name."""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from slime_core.algorithms import ADVANTAGE_ESTIMATORS, LOSSES

TABLES = {
    "slime_core.algorithms": "the rows",
    "slime_megatron.step.losses": "the functions of the losses, by name",
    "slime_core.ops.losses": "a function for each paper, which says the paper's estimator",
    "slime_core.ops": "names of functions; one has the name of a loss",
    "slime_core.former_names": "the same",
    "slime_launch.train": "the command `sft`, which is named for its loss",
    "slime_launch.commands": "words that people type in place of a command",
}
PACKAGES = ("slime_convert", "slime_core", "slime_launch", "slime_megatron", "slime_rollout")


def test_a_loss_and_an_estimator_are_known_everywhere_by_a_row_each():
    program = Path(__file__).parent / "support" / "planted_rows.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def named(file):
    """The losses and estimators that a source file has as texts of their own."""
    texts = {node.value for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, ast.Constant)}
    return texts & {*LOSSES, *ADVANTAGE_ESTIMATORS}


def test_only_the_tables_have_names_of_losses_and_estimators():
    found = set()
    for package in PACKAGES:
        (root,) = map(Path, importlib.util.find_spec(package).submodule_search_locations)
        for file in root.rglob("*.py"):
            place = ".".join((package, *file.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
            found |= {place} if named(file) else set()
    assert found == TABLES.keys()
