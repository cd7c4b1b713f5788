"""Every recipe's run.toml passes its plan for H100s, on the machines that it names, with the figures that its page has.

The files that it names have stand-ins (see stand_ins.py): the models' sizes are the real ones.
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import LAUNCHER, rows, run
from stand_ins import Planned, model_config, plan_words
from test_recorded import record
from tiny import VOCAB_SIZE, make_tokenizer, write_prompts

from slime_convert.check.tiny import build, tiny_config
from slime_launch.plan.build import Plan
from slime_launch.plan.text import plan_text

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
RECIPES = sorted(path.parent.name for path in EXAMPLES.glob("*/run.toml"))
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
NUMBERS_ABOVE = {"sixteen": 16, "thirty-two": 32}
MACHINES = re.compile(r"([\w-]+) nodes? of ([\w-]+) GPUs?", re.IGNORECASE)
PLANNED = re.compile(r"^What `plan` says.*?^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def number(word: str) -> int:
    """A number, or its word."""
    word = word.lower()
    return NUMBERS_ABOVE.get(word) or (NUMBERS.index(word) if word in NUMBERS else int(word))


def machines(text: str) -> tuple[int, int]:
    """Nodes and GPUs of each, as a text says them."""
    found = MACHINES.search(text)
    assert found is not None, f"no `N nodes of M GPUs` in: {text}"
    return number(found[1]), number(found[2])


def filled(plan: Plan) -> tuple[int, int]:
    """Nodes, and the GPUs on each that a plan takes."""
    taken = {
        len({*range(len(node.trainer_ranks)), *(gpu for one in node.engines for gpu in one.gpus)})
        for node in plan.nodes
    }
    assert len(taken) == 1, f"nodes with {taken} GPUs"
    return len(plan.nodes), taken.pop()


def shown(readme: str) -> list[str]:
    """The lines of a plan that a page shows."""
    return [line for block in PLANNED.findall(readme) for line in block.splitlines() if line.strip(" …")]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Planned]:
    """From a recipe to its plan, which is made once."""

    @functools.cache
    def of(name: str) -> Planned:
        words = ["slime-launch", "train", "--config", f"examples/{name}/run.toml"]
        return plan_words(words, tmp_path_factory.mktemp("plan"))

    return of


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_passes_its_plan(name: str, planned: Callable[[str], Planned]) -> None:
    assert planned(name).problems == []


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fills_the_machines_that_it_names(name: str, planned: Callable[[str], Planned]) -> None:
    plan = planned(name).plan
    assert plan is not None
    first_line = (EXAMPLES / name / "run.toml").read_text(encoding="utf-8").splitlines()[0]
    assert machines(first_line) == filled(plan)
    readme = (EXAMPLES / name / "README.md").read_text(encoding="utf-8")
    assert {machines(found[0]) for found in MACHINES.finditer(readme)} <= {filled(plan)}


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_of_a_recipe_has_the_figures_of_its_plan(name: str, planned: Callable[[str], Planned]) -> None:
    plan = planned(name).plan
    assert plan is not None
    readme = (EXAMPLES / name / "README.md").read_text(encoding="utf-8")
    lines = {" ".join(line.split()) for line in plan_text(plan).splitlines()}
    assert [line for line in shown(readme) if " ".join(line.split()) not in lines] == []


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_of_a_recipe_has_its_command(name: str) -> None:
    readme = (EXAMPLES / name / "README.md").read_text(encoding="utf-8")
    assert readme.startswith("# ")
    assert f"--config examples/{name}/run.toml" in readme
    for laptop in (EXAMPLES / name).glob("laptop.toml"):
        assert f"--config examples/{name}/{laptop.name}" in readme


# A tiny model of the recipe's family takes a step with the recipe's own flags: parallel sizes are cut to two, and what
# names files, engines and sizes of rollouts is replaced. Rollouts are recorded ones: SGLang's CPU build cannot generate
# with all of these families.
LARGE = (
    *("deepseek-r1", "delta-sync", "glm4-9b", "glm4.5-355b"),
    *("kimi-k2", "low-precision", "moonlight", "qwen3-30b-a3b"),
)
REPLACED = (
    *("hf-checkpoint", "load", "save", "save-interval", "output-dir", "prompt-data", "eval-prompt-data"),
    *("actor-num-nodes", "actor-num-gpus-per-node", "rollout-num-gpus", "rollout-num-gpus-per-engine"),
    *("num-rollout", "rollout-batch-size", "n-samples-per-prompt", "global-batch-size", "max-tokens-per-gpu"),
    *("over-sampling-batch-size", "decoder-last-pipeline-num-layers", "rollout-max-response-len"),
)
"""Flags with other values, or none; besides those of engines: SGLang's, of evaluation and of weight updates."""
PARALLEL = tuple(f"{kind}-parallel-size" for kind in ("tensor-model", "pipeline-model", "context", "expert-model"))
OF_ENGINES = ("sglang-", "eval-", "n-samples-per-eval", "update-weight-", "rollout-stop-token-ids")


def tiny_model(config: dict[str, Any], layers: int, directory: Path) -> Path:
    """A random model of a published model's kind, whose heads and experts two ranks can share."""
    tiny = tiny_config(config) | {"vocab_size": VOCAB_SIZE, "num_hidden_layers": layers, "num_attention_heads": 4}
    tiny |= {"num_key_value_heads": 4 if "kv_lora_rank" in tiny else 2}
    tiny |= {key: 8 for key in ("num_experts", "n_routed_experts") if key in tiny}
    build(tiny, directory)
    make_tokenizer(directory)
    return directory


def scaled(given: dict[str, Any]) -> tuple[dict[str, Any], int, int]:
    """The flags of a recipe that a small run has, its ranks, and its model's layers."""
    flags = {
        name: value
        for name, value in given.items()
        if name not in REPLACED and not name.startswith(OF_ENGINES) and name not in PARALLEL
    }
    sizes = {name: min(2, given.get(name, 1)) for name in PARALLEL}
    tensor, pipeline, context, expert = sizes.values()
    if tensor * pipeline * context > 4:
        context = sizes["context-parallel-size"] = 1
    layers = 2 * pipeline
    if "decoder-last-pipeline-num-layers" in given:
        flags["decoder-last-pipeline-num-layers"], layers = 1, 3
    return flags | sizes, max(tensor * context, expert) * pipeline, layers


def as_words(flags: dict[str, Any]) -> list[str]:
    """Flags as words of a command."""
    words = []
    for name, value in flags.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        words += [f"--{name}", *map(str, values)]
    return words


@pytest.mark.full
@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", LARGE)
def test_the_flags_of_a_large_recipe_take_a_step_with_a_tiny_model(name: str, tmp_path: Path) -> None:
    given = tomllib.loads((EXAMPLES / name / "run.toml").read_text(encoding="utf-8"))
    flags, ranks, layers = scaled(given)
    config = model_config(given["load"])
    assert config is not None
    hf = tiny_model(config, layers, tmp_path / "hf")
    small = {
        "hf-checkpoint": hf,
        "load": hf,
        "output-dir": tmp_path / "out",
        "save": tmp_path / "save",
        "prompt-data": write_prompts(tmp_path / "prompts.jsonl", 8),
        "load-debug-rollout-data": record(tmp_path / "recorded", 1),
        "debug-train-only": True,
        "actor-num-gpus-per-node": ranks,
        "num-rollout": 1,
        "rollout-batch-size": 8,
        "n-samples-per-prompt": 8,
        "max-tokens-per-gpu": 256,
    }
    if "num-steps-per-rollout" not in given:
        small["global-batch-size"] = 64
    run([str(LAUNCHER), "train", *as_words(flags | small)], tmp_path / "log.txt", seconds=600)
    steps = rows(tmp_path, "train")
    assert len(steps) == given.get("num-steps-per-rollout", 1)
    assert all(math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0 for row in steps)
