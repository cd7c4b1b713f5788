"""The README and the pages: what they name is there, their Python is Python, and their links lead somewhere."""

import ast
import importlib
import inspect
import pkgutil
import re
import shlex
import sys
from pathlib import Path

import pytest

import slime_core
import slime_rollout
from slime_core.flags import flag_specs
from slime_rollout.cli import main
from slime_rollout.config import RolloutConfig
from slime_rollout.engine.config import EngineConfig
from slime_rollout.eval_sets import KEYS, read_eval_sets
from slime_rollout.hooks.contracts import TIME_LIMIT
from slime_rollout.reward_config import RULES

PACKAGE = Path(__file__).parents[1]
PAGES = [PACKAGE / "README.md", *sorted((PACKAGE / "docs").glob("*.md"))]
TEXTS = {page.relative_to(PACKAGE).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
FLAGS = {spec.name for config in (RolloutConfig, EngineConfig) for spec in flag_specs(config)}
# Those of the launcher and the trainer (a test of the whole command line looks for them there), of check-hooks, SGLang
# and receive-weights.
ELSEWHERE = {
    *("--colocate", "--opd-kl-coef", "--opd-teacher-load", "--rollout-num-gpus", "--save", "--use-opd", "--use-tis"),
    *("--custom-advantage-function-path",),
    *("--reply", "--run", "--time-limit"),
    *("--config", "--sglang-api-key"),
    *("--context-length", "--enable-deterministic-inference", "--model-path", "--port"),
    *("--from", "--listen", "--to"),
}
THEIRS = {"CustomRewardModel"}  # user-defined

every_page = pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def prose(text):
    """Without blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def find(name):
    """What a dotted name stands for."""
    head, *rest = name.split(".")
    value = importlib.import_module(head)
    for depth, part in enumerate(rest, 1):
        if not hasattr(value, part):
            importlib.import_module(".".join([head, *rest[:depth]]))
        value = getattr(value, part)
    return value


def test_they_name_every_flag_and_no_other():
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])", "\n".join(TEXTS.values())))
    assert (sorted(named - FLAGS - ELSEWHERE), sorted(FLAGS - named), sorted(ELSEWHERE - named)) == ([], [], [])


def test_defaults_are_those_of_the_code():
    given = {spec.name: spec.default for config in (RolloutConfig, EngineConfig) for spec in flag_specs(config)}
    own = RolloutConfig.of(hf_checkpoint="m", prompt_data="p", rollout_batch_size=1, custom_rm_path="a.b")
    given |= {"--rm-timeout": own.rewards.reward_timeout, "--time-limit": TIME_LIMIT}
    given |= {"--engine-threads": EngineConfig().threads}
    told = re.findall(r"`(--[a-z-]+)` \((\d[\d,.]*)(?: s| GiB)?[),;]", "\n".join(TEXTS.values()))
    (table,) = re.findall(r"\| flag \| default .*?\n(?=\n)", TEXTS["docs/generation.md"], re.DOTALL)
    for row in table.splitlines():
        _, flags, defaults, *_ = row.split("|")
        told += zip(re.findall(r"`(--[a-z-]+)`", flags), re.findall(r"-?\d[\d,]*(?:\.\d+)?", defaults), strict=False)
    assert len(told) > 20
    for flag, number in told:
        assert float(number.replace(",", "")) == given[flag], flag


@every_page
def test_python_compiles_and_finds_what_it_imports(text):
    for block in blocks(text, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                for name in node.names:
                    assert hasattr(importlib.import_module(node.module), name.name), name.name


@every_page
def test_dotted_names_are_there(text):
    for name in set(re.findall(r"\bslime_(?:rollout|core)(?:\.[A-Za-z]\w*)+", text)):
        find(name)


@every_page
def test_names_in_capitals_are_those_of_the_code(text):
    defined = {
        node.name
        for package in (slime_core, slime_rollout)
        for path in Path(package.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    named = set(re.findall(r"`([A-Z][a-z]+[A-Z]\w*|[A-Z]{2}\w*[a-z]\w*)(?=[`.(])", prose(text)))
    assert sorted(named - defined - THEIRS) == []


def test_the_table_of_modules():
    (table,) = re.findall(r"\| module \| holds \|\n.*?\n\n", TEXTS["README.md"], re.DOTALL)
    rows = [row.split("|")[1:3] for row in table.strip().splitlines()[2:]]
    listed = set()
    for modules, names in rows:
        paths = [path if path[0] != "." else f"slime_rollout{path}" for path in re.findall(r"`([\w.]+)`", modules)]
        listed |= set(paths)
        found = [find(path) for path in paths]
        for name in re.findall(r"`([\w.]+)`", names):
            if name.startswith("."):
                found.append(find(paths[0] + name))
                continue
            assert any(hasattr(holder, name) for holder in found), name
            found += [getattr(holder, name) for holder in found if inspect.isclass(getattr(holder, name, None))]
    packages = [module.name for module in pkgutil.iter_modules(slime_rollout.__path__) if module.ispkg]
    assert {f"slime_rollout.{name}" for name in packages} <= listed


@pytest.mark.parametrize("page", PAGES, ids=TEXTS)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text(encoding="utf-8"))):
        if target.startswith("https://"):
            continue
        path, _, place = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        if not to.is_relative_to(PACKAGE) and not (PACKAGE.parents[1] / "docs").is_dir():
            continue  # the project's pages are not in what is released of this package
        assert to.is_file(), target
        headings = re.findall(r"^#+ (.*)$", prose(to.read_text(encoding="utf-8")).lower(), re.MULTILINE)
        places = {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings}
        assert not place or place in places, target


def test_every_page_is_reached_from_the_readme():
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= set(re.findall(r"\]\(([^)#\s]+)", TEXTS["README.md"]))


def test_every_rule_has_its_row():
    (table,) = re.findall(r"\| `--rm-type` .*?\n\n", TEXTS["docs/rewards.md"], re.DOTALL)
    rows = set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))
    assert rows == {rule for rule in RULES if not rule.startswith("boxed_")} | {"boxed_"}


def test_the_held_out_sets_on_their_page(tmp_path):
    text = TEXTS["docs/evaluation.md"]
    (file,) = blocks(text, "yaml")
    (tmp_path / "sets.yaml").write_text(file)
    config = RolloutConfig.of(
        hf_checkpoint="m", prompt_data="p", rollout_batch_size=1, eval_config=str(tmp_path / "sets.yaml")
    )
    aime, gpqa, style = read_eval_sets(config)
    assert (aime.n_samples_per_eval_prompt, aime.temperature, aime.config.rewards.rm_type) == (16, 0.6, "math")
    assert (gpqa.config.data.label_key, gpqa.config.rewards.rm_type, style.config.rewards.custom_rm_path) == (
        "answer",
        "gpqa",
        "style.py",
    )
    (table,) = re.findall(r"\| key of a set .*?\n(?=\n)", text, re.DOTALL)
    keys = {key for row in table.splitlines() for key in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    assert keys == set(KEYS) - {"name", "path"}


def test_the_hooks_on_the_pages_pass_the_command_on_theirs(tmp_path, monkeypatch, capsys):
    (tmp_path / "turns.py").write_text(blocks(TEXTS["docs/generation.md"], "python")[0])
    (tmp_path / "score.py").write_text(blocks(TEXTS["docs/rewards.md"], "python")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (command,) = (block for block in blocks(TEXTS["docs/hooks.md"], "bash") if "check-hooks" in block)
    assert main(shlex.split(command.replace("\\\n", " "), comments=True)[1:]) == 0
    generate, reward = capsys.readouterr().out.splitlines()
    assert generate.startswith("ok ") and "4 samples became 4 with 8 requests" in generate
    assert reward.startswith("ok ")
