"""The site: every Markdown page of the repository, and the Python API, read from the sources without importing them.

`scripts/docs` builds it. Pages are plain Markdown, so that a code host shows the same.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from docutils.nodes import Element, TextElement
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

ROOT = Path(__file__).resolve().parents[1]

PUBLIC = {
    "core": "errors files algorithms balance config flags flops hooks interfaces memory metrics micro_batches rewards "
    "schedule step_plan user_functions types.* ops.*",
    "convert": "errors check check.models check.results compare compare.checkpoints compare.distance compare.outcome "
    "conversions conversions.from_gguf conversions.from_megatron conversions.lora conversions.quantized "
    "conversions.to_megatron families families.family families.known families.layouts formats formats.hf formats.known "
    "inspection mapping progress published quantize quantize.formats quantize.numbers shape shape.flags shape.model",
    "rollout": "errors config data data.dataset data.offline data.source data_service engine engine.addresses "
    "engine.channels engine.config engine.transports eval_sets filters generate generate.context generate.custom "
    "generate.trajectory generation_service hooks.* rewards rewards.answers rewards.choices rewards.custom "
    "rewards.maths rewards.rules rewards.scorers rollout serving_engines store weights",
    "megatron": "errors checkpoints.find model.lora ranks.device settings.arguments settings.config settings.memory "
    "settings.operations service start step.losses worker worker.worker",
    "launch": "config config_file errors flags loop manifest metric_names migrate plan plan.build report run tracking "
    "validate",
}
"""Modules of each package that have a page, below the package's name; `ops.*` is `ops` and all modules in it."""


def modules(package: str, names: str) -> set[Path]:
    """The files of a package's modules that have a page, its `__init__.py` among them."""
    source = ROOT / "packages" / f"slime-{package}" / "src" / f"slime_{package}"
    found = {source / "__init__.py"}
    for name in names.split():
        place = source / name.removesuffix(".*").replace(".", "/")
        files = [place.with_suffix(".py"), place / "__init__.py"]
        if name.endswith(".*"):
            files += place.glob("*.py")
        there = {file for file in files if file.is_file()}
        if not there:
            raise ValueError(f"docs/conf.py: slime_{package} has no module {name}")
        found |= there | {folder / "__init__.py" for folder in place.parents if folder.is_relative_to(source)}
    return found


def private() -> list[str]:
    """The files of all other modules."""
    public = {file for package, names in PUBLIC.items() for file in modules(package, names)}
    return [str(file) for file in sorted(ROOT.glob("packages/*/src/**/*.py")) if file not in public]


project = "slime"
author = "the slime developers"
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/**.md",
    "docs/reference/python/**.rst",
    "examples/README.md",
    "examples/*/README.md",
    "packages/*/README.md",
    "packages/*/docs/*.md",
]
# Environments and what runs leave: Sphinx looks into every directory, twice.
exclude_patterns = [".*", "outputs", "runs", "**/__pycache__", "**/*.egg-info"]
extensions = ["myst_parser", "sphinx.ext.napoleon", "autoapi.extension"]
suppress_warnings = [
    "autoapi.python_import_resolution",  # names of modules that have no page
    "ref.python",  # `Raises` names an error without its module, and two packages may have one of that name
]

html_theme = "furo"
html_title = "slime"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False

myst_heading_anchors = 4

# The Python API: written to docs/reference/python while the site is built, and removed at the end.
autoapi_dirs = [str(ROOT / "packages" / f"slime-{package}" / "src") for package in PUBLIC]
autoapi_ignore = private()
autoapi_root = "docs/reference/python"
autoapi_add_toctree_entry = False
autoapi_keep_files = False
autoapi_member_order = "bysource"
autoapi_options = ["members", "show-inheritance", "show-module-summary"]
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def literal(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text with code in backticks: make reStructuredText of it.

    Code gets double backticks, apart from roles; what stands outside of code loses the meaning that
    reStructuredText would see in its asterisks, bars and underscores. A block that is indented for itself is literal.
    """
    text = re.sub(r"^Args, besides (.+):$", r"Arguments are \1, and these.\n\nArgs:", "\n".join(lines), flags=re.M)
    text = re.sub(r"(?<=\n)((?![- \n]|\d+\.|\.\.).*\n)\n(?=    (?!-))", r"\1\n::\n\n", f"\n{text}").removeprefix("\n")
    parts = re.split(r"(:[a-z:]+:`[^`]*`|``.+?``|`[^`\n]+`|\*\*[^*`]+\*\*)", text, flags=re.DOTALL)
    for at, part in enumerate(parts):
        if at % 2 == 0:
            parts[at] = re.sub(r"(?<!\\)(\*|\||(?<=\w)_(?!\w))", r"\\\1", part)
        elif part.startswith("`") and not part.startswith("``"):
            parts[at] = f"`{part}`"
    lines[:] = "".join(parts).split("\n")


def exported(app: Sphinx, env: BuildEnvironment, node: pending_xref, text: TextElement) -> Element | None:
    """The link of a name that a package gives under its own, such as `slime_core.ops.tis_weights`."""
    package, _, name = node.get("reftarget", "").rpartition(".")
    if node.get("refdomain") != "py" or package.partition(".")[0] not in {f"slime_{name}" for name in PUBLIC}:
        return None
    objects = env.domains.python_domain.objects
    found = [full for full in objects if full.startswith(f"{package}.") and full.endswith(f".{name}")]
    if len(found) != 1:
        return None
    entry = objects[found[0]]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, text, found[0])


def front_page(app: Sphinx, error: Exception | None) -> None:
    """The page that leads to docs/index.html, at the top of the site."""
    if error is None:
        target = f"{root_doc}.html"
        html = f'<!doctype html><title>slime</title><meta http-equiv="refresh" content="0; url={target}">'
        (app.outdir / "index.html").write_text(f'{html}<a href="{target}">slime</a>\n', encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Connect them."""
    # docs/index.md has pages in an order and then all others of a folder (`*`), of which there may be none.
    toctrees = logging.getLogger("sphinx.sphinx.directives.other")
    toctrees.addFilter(lambda record: "didn't match any documents" not in record.msg)
    app.connect("autodoc-process-docstring", literal, priority=100)  # before napoleon
    app.connect("missing-reference", exported)
    app.connect("build-finished", front_page)
