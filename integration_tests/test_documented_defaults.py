"""Defaults of the public functions are those of documented_defaults.json: a caller who leaves one out relies on it.

python integration_tests/test_documented_defaults.py    writes the file
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = Path(__file__).with_name("documented_defaults.json")


def documented() -> dict[str, list[Path]]:
    """The modules that have a page in the reference, by import name, read from docs/conf.py without importing it."""
    tree = ast.parse((ROOT / "docs" / "conf.py").read_text(encoding="utf-8"))
    [names] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PUBLIC"
    ]
    found = {}
    for package, words in names.items():
        source = ROOT / "packages" / f"slime-{package}" / "src" / f"slime_{package}"
        for word in words.split():
            place = source / word.removesuffix(".*").replace(".", "/")
            files = [place.with_suffix(".py"), place / "__init__.py", *(place.glob("*.py") if "*" in word else ())]
            found[f"slime_{package}.{word}"] = [file for file in files if file.is_file()]
    return found


def defaults() -> dict[str, dict[str, str]]:
    """Every public function and method with defaults: argument → default, as the source has them."""
    found = {}
    for file in sorted({file for files in documented().values() for file in files}):
        module = ".".join(file.relative_to(ROOT / "packages").with_suffix("").parts[2:]).removesuffix(".__init__")
        for name, function in _functions(ast.parse(file.read_text(encoding="utf-8")).body):
            if given := dict(_defaults(function.args)):
                found[f"{module}.{name}"] = given
    return found


def _functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and re.match(r"__init__$|[^_]", node.name):
            yield f"{prefix}{node.name}", node


def _defaults(arguments: ast.arguments) -> Iterator[tuple[str, str]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [
        *zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    yield from ((argument.arg, ast.unparse(default)) for argument, default in pairs if default is not None)


def test_every_default_is_the_documented_one() -> None:
    assert defaults() == json.loads(FILE.read_text(encoding="utf-8"))


def test_those_that_a_loop_of_ones_own_relies_on_are_among_them() -> None:
    found = defaults()
    assert found["slime_core.ops.off_policy.tis_weights"]["lower"] == "0.0"
    assert found["slime_core.ops.advantages.estimator_named"] == {"gamma": "1.0", "lambd": "1.0"}
    assert found["slime_core.ops.advantages.outcome_advantages"]["kl_coef"] == "0.0"
    assert found["slime_core.ops.token_losses.gspo_token_loss"]["token_form"] == "False"
    assert found["slime_core.ops.linear_log_probs.linear_log_probs_and_entropy"]["with_entropy"] == "False"
    assert any("seed" in given for name, given in found.items() if name.startswith("slime_rollout.data"))
    assert all(documented().values())


if __name__ == "__main__":
    FILE.write_text(json.dumps(defaults(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
