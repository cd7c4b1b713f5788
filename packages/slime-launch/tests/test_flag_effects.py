"""No flag is without effect: each, given, changes a command line, a request, a number, a tensor or a plan.

A flag that no row of :data:`HOW` names is given alone, with another value than its default, and what is made of the
settings must differ. A row says what has to be given with it, and its value. What only a run shows, such as a time
limit, has a row in ``data/flag_effects.toml`` with the test that shows it.
"""

import ast
import asyncio
import contextlib
import dataclasses
import functools
import io
import json
import os
import sys
import time
import tomllib
import types
from pathlib import Path

import pytest
import torch

from slime_convert.errors import ShapeMismatchError
from slime_convert.published import PUBLISHED
from slime_convert.shape import SHAPE_FLAGS, ModelShape, check_flags
from slime_core import ops
from slime_core.config import GROUP_RELATIVE
from slime_core.hooks import HookArgs
from slime_core.types import Sample
from slime_launch.calls import Watch
from slime_launch.console import RunConsole
from slime_launch.devices import find_device
from slime_launch.errors import Problems
from slime_launch.flags import parse_train, read_train, train_groups
from slime_launch.plan.build import make_plan
from slime_launch.ray_runtime import _embedded_options
from slime_launch.resume import RunState
from slime_launch.wandb_run import WandbRun
from slime_megatron.settings.megatron_values import slime_values
from slime_rollout.engine.router import router_command
from slime_rollout.engine.server import EngineSpec, equal_specs, server_command, server_environment
from slime_rollout.eval_sets import read_eval_sets
from slime_rollout.generate.context import SamplingParams

DATA = Path(__file__).parent / "data"
REPOSITORY = Path(__file__).parents[3]
SHOWN = {f"--{name}": test for name, test in tomllib.loads((DATA / "flag_effects.toml").read_text()).items()}
FLAGS = {spec.name: spec for group in train_groups() for spec in group.flags if group.title != "Megatron: model shape"}
SHAPE = {spec.name: spec for group in train_groups() for spec in group.flags if group.title == "Megatron: model shape"}
WRONG = {int: "7777", float: "0.777"}
BASE = (
    "--hf-checkpoint hf --load dist --save save --prompt-data train.jsonl --eval-prompt-data eval train.jsonl "
    "--rollout-batch-size 4 --n-samples-per-prompt 2 --num-rollout 2 --rollout-num-gpus 4 --actor-num-gpus-per-node 4"
)
WANDB = "--use-wandb --wandb-mode offline"
MIS, TIS, DPO = "--use-mis", "--use-tis", "--loss-type dpo_loss"
DISK, DELTA = "--update-weight-transport disk", "--update-weight-transport disk --update-weight-disk-dir d"
DECAYING, FULL = "--lr-decay-style linear --lr-decay-iters 8 --lr 1e-4", "--recompute-granularity full"
# What is given with a flag, if anything, and its value.
HOW = {
    "--num-epoch": ("", "20"),
    "--n-samples-per-prompt": ("", "6"),
    "--num-rollout": ("", "7"),
    "--rollout-max-num-gpus": ("--use-fault-tolerance", "8"),
    "--rollout-top-k": ("--custom-generate-function-path f.py:f", "5"),
    "--rollout-top-p": ("--custom-generate-function-path f.py:f", "0.5"),
    "--rollout-min-p": ("--custom-generate-function-path f.py:f", "0.1"),
    "--eval-reward-key": ("--rm-type dapo --reward-key score", "acc"),
    "--mis-level": (MIS, "sequence"),
    "--mis-mode": (MIS, "clip"),
    "--mis-upper-bound": (MIS, "1.1"),
    "--mis-lower-bound": (f"{MIS} --mis-mode clip --mis-upper-bound 1.2", "0.99"),
    "--mis-batch-normalize": (MIS, None),
    "--mis-rs-level": (f"{MIS} --mis-rs-upper-bound 1.01", "token"),
    "--mis-rs-upper-bound": (f"{MIS} --mis-rs-level token", "1.01"),
    "--mis-rs-lower-bound": (f"{MIS} --mis-rs-level token --mis-rs-upper-bound 3", "0.99"),
    "--mis-veto-threshold": (MIS, "0.9"),
    "--tis-mode": (f"{TIS} --tis-clip 1.1", "icepop"),
    "--tis-clip": (TIS, "1.1"),
    "--tis-clip-low": (TIS, "0.9"),
    "--opsm-delta": ("--use-opsm", "100"),
    "--use-opsm": ("--opsm-delta 0", None),
    "--use-unbiased-kl": ("--use-kl-loss --kl-loss-coef 0.1", None),
    "--kl-loss-coef": ("--use-kl-loss", "0.3"),
    "--kl-loss-type": ("--use-kl-loss --kl-loss-coef 0.1", "k2"),
    "--opd-kl-coef": ("--use-opd", "0.3"),
    "--gamma": ("--advantage-estimator ppo", "0.5"),
    "--lambd": ("--advantage-estimator ppo", "0.5"),
    "--eps-clip": ("", "0.01"),
    "--eps-clip-high": ("", "0.01"),
    "--eps-clip-c": ("", "1.1"),
    "--value-clip": ("--advantage-estimator ppo", "0.01"),
    "--dpo-beta": (DPO, "0.3"),
    "--dpo-label-smoothing": (DPO, "0.2"),
    "--dpo-reference-free": (DPO, None),
    "--loss-divisor": ("", "7"),
    "--virtual-pipeline-model-parallel-size": ("--pipeline-model-parallel-size 2 --num-layers 4", "2"),
    "--sequence-parallel": ("--tensor-model-parallel-size 2", None),
    "--max-tokens-per-gpu": ("--use-dynamic-batch-size", "4096"),
    "--use-dynamic-batch-size": ("--max-tokens-per-gpu 4096", None),
    "--lora-rank": ("", "4"),
    "--lora-target-modules": ("--lora-rank 4", "linear_qkv"),
    "--recompute-granularity": ("--recompute-method uniform --recompute-num-layers 1", "full"),
    "--recompute-method": (f"{FULL} --recompute-num-layers 1", "block"),
    "--recompute-num-layers": (f"{FULL} --recompute-method uniform", "2"),
    "--recompute-modules": ("--recompute-granularity selective", "mlp"),
    "--lr": ("", "0.1"),
    "--min-lr": (DECAYING, "1e-5"),
    "--lr-warmup-init": (f"{DECAYING} --lr-warmup-iters 4", "1e-5"),
    "--lr-warmup-iters": (DECAYING, "4"),
    "--lr-warmup-fraction": (DECAYING, "0.5"),
    "--lr-decay-style": ("--lr 1e-4", "cosine"),
    "--lr-decay-iters": ("--lr 1e-4 --lr-decay-style linear", "6"),
    "--overlap-param-gather": ("--use-distributed-optimizer --overlap-grad-reduce on", "on"),
    "--custom-config-path": ("--custom-generate-function-path f.py:f", None),
    "--ref-ckpt-step": ("--ref-load dist", None),
    "--critic-load": ("--advantage-estimator ppo", None),
    "--critic-save": ("--advantage-estimator ppo", None),
    "--num-critic-only-steps": ("--advantage-estimator ppo", None),
    "--opd-teacher-load": ("--use-opd --opd-type megatron", None),
    "--critic-lr": ("--advantage-estimator ppo", "0.1"),
    "--critic-lr-warmup-iters": ("--advantage-estimator ppo", "3"),
    "--eval-interval": ("", "3"),
    "--eval-prompt-data": ("", "more train.jsonl"),
    "--wandb-mode": ("--use-wandb --wandb-group g", "offline"),
    "--wandb-project": (WANDB, "p"),
    "--wandb-group": (WANDB, "g"),
    "--wandb-team": (WANDB, "t"),
    "--wandb-host": (WANDB, "http://h"),
    "--wandb-dir": (WANDB, "d"),
    "--wandb-run-id": (WANDB, "i"),
    "--wandb-key": (WANDB, "k"),
    "--disable-wandb-random-suffix": (f"{WANDB} --wandb-group g", None),
    # Refused, whatever else is given: there is one value.
    "--attention-dropout": ("", "0.1"),
    "--hidden-dropout": ("", "0.1"),
    "--optimizer": ("", "sgd"),
    "--ckpt-format": ("", "zarr"),
}
REFUSED = ("--attention-dropout", "--hidden-dropout", "--optimizer", "--ckpt-format")


@pytest.fixture
def workspace_here(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    monkeypatch.delenv("PYTHONPATH")
    (workspace / "out").mkdir()
    (workspace / "f.py").write_text("async def f(args, sample, sampling_params):\n    return sample\n")
    return workspace


def loss(algorithm):
    """What the algorithm's loss is of a few log-probs, with all that an algorithm may look at."""
    rows = torch.Generator().manual_seed(1)
    old, new, ref, engine, teacher, values, new_values = (
        -1 - torch.randn(6, 4, generator=rows, dtype=torch.float64).abs() for _ in range(7)
    )
    if algorithm.loss_type == "dpo_loss":
        given = {"beta": algorithm.dpo_beta, "label_smoothing": algorithm.dpo_label_smoothing}
        reference = (None, None) if algorithm.dpo_reference_free else (ref[::2].sum(1), ref[1::2].sum(1))
        return ops.dpo_loss(new[::2].sum(1), new[1::2].sum(1), *reference, **given)[0].item()
    mask = (torch.arange(4) < torch.tensor([4, 1, 2, 4, 3, 2]).unsqueeze(1)).long()
    rewards, groups = [1.0, 0.0, 0.5, 1.0, 0.0, 0.25], [0, 0, 0, 1, 1, 1]
    relative = algorithm.advantage_estimator in GROUP_RELATIVE and not algorithm.disable_rewards_normalization
    given = {
        "group_ids": groups if relative else None,
        "old_log_probs": None if algorithm.use_rollout_logprobs and not algorithm.advantages_need_log_probs else old,
        "ref_log_probs": ref if algorithm.needs_reference else None,
        "rollout_log_probs": (
            old + 0.5 * (engine - old) if algorithm.needs_rollout_log_probs or algorithm.use_opsm else None
        ),
        "teacher_log_probs": teacher if algorithm.use_opd else None,
        "values": values if algorithm.needs_critic or algorithm.custom_advantage_function_path else None,
    }
    found, _ = ops.algorithm_loss(algorithm, new, mask, rewards=rewards, entropy=values.abs(), **given)
    clipped = values + (new_values - values).clamp(-algorithm.value_clip, algorithm.value_clip)
    return found.item(), clipped.sum().item() if algorithm.needs_critic else 0


def rates(megatron):
    """The learning rate of the first steps."""
    from slime_megatron.step.optimizer import build_scheduler

    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=megatron.lr)
    scheduler = build_scheduler(optimizer, megatron)
    found = []
    for _ in range(6):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step(1)
    return found


def made(words):
    """What is made of a command: lines of refusal, command lines, requests, numbers for core, a loss, rates, a plan."""
    try:
        settings, refused = read_train(words.split(), on_gpu=False)
    except Exception as error:
        return {"refused": str(error)}
    problems = Problems(refused)
    sets = problems.attempt(read_eval_sets, settings.rollout) or ()
    if problems.lines:
        return {"refused": problems.lines}
    engine, model = settings.engine, EngineSpec(model_path="hf", dtype="float32")
    specs = equal_specs(model, 2, engine)
    shape = ModelShape.from_hf_config("hf")
    roles = {"actor": settings.megatron, "critic": critic(settings)}
    plan = make_plan(settings, Problems(), find_device("h100", None), gpus_per_node=8, elsewhere=True).as_json()
    del plan["derived"]  # is what was given
    return {
        "engines": [(server_command(engine, spec), set(server_environment(engine, spec).items())) for spec in specs],
        "router": router_command(engine, port=1, prometheus_port=2),
        "ray": _embedded_options(settings.cluster, Path("ray")),
        "tracking": tracked(settings),
        "evaluations": evaluations(settings),
        "requests": [SamplingParams.for_rollout(settings.rollout).to_request(1)],
        "evaluation": [
            (
                held.path,
                held.n_samples_per_eval_prompt,
                str(held.config.data),
                SamplingParams.for_evaluation(held),
                held.config.rewards.reward_key,
            )
            for held in sets
        ],
        "core": {role: slime_values(shape, config, on_gpu=False) for role, config in roles.items()},
        "rates": {role: rates(config) for role, config in roles.items()},
        "loss": loss(settings.algorithm),
        "plan": json.dumps(plan, default=str),
    }


def tracked(settings):
    """What W&B is started with, and which number a row of it is drawn over."""
    if not settings.tracking.use_wandb:
        return None
    given = []

    class Run:
        id = "i"

        def __getattr__(self, name):
            return lambda *words, **named: given.append((name, words, named))

    module = types.ModuleType("wandb")
    module.init, module.Settings = lambda **words: given.append(words) or Run(), dict
    sys.modules["wandb"], key = module, os.environ.pop("WANDB_API_KEY", None)
    try:
        WandbRun(settings.tracking, {}, Path("out"), resumed=False, steps_per_rollout=2)
    finally:
        del sys.modules["wandb"]
    return [str(words) for words in given], key


def evaluations(settings):
    """The rollouts after which held-out sets are scored."""
    state, found = RunState(settings, None, None, output_dir=Path("out")), []
    for number in range(9):
        found += [number] * state.due.evaluate
        state.trained(number)
    return found


def critic(settings):
    from slime_megatron.settings.overrides import role_config

    return role_config(settings.megatron, "critic", {})


def value_of(spec):
    """Words that change a flag from its default."""
    if spec.is_switch:
        return ""
    if spec.choices:
        return next(choice for choice in spec.choices if choice != spec.default)
    if spec.type is str:
        return "other"
    start = spec.default if isinstance(spec.default, int | float) else 1
    values = (spec.type(value) for value in (start * 2, start + 1, start / 2, 0.5))
    return str(next(value for value in values if value != spec.default and spec.problem(value) is None))


@pytest.fixture(scope="session")
def made_before():
    """What is made without a flag, of words that many flags share."""
    return functools.cache(made)


@pytest.mark.parametrize("name", [name for name in FLAGS if name not in SHOWN])
def test_a_flag_changes_what_is_made(name, made_before, workspace_here):
    beside, value = HOW.get(name, ("", None))
    base = f"{BASE} {beside}"
    given = f"{base} {name} {value_of(FLAGS[name]) if value is None else value}"
    before, after = made_before(base), made(given)
    changed = {part for part in after if after[part] != before.get(part)}
    assert changed, f"{name} changes nothing"
    assert ("refused" in changed) == (name in REFUSED), (before, after)


def definitions(path):
    """Functions, classes with their methods, and constants of a file, by name: each node with the file's text."""
    text, found = path.read_text(encoding="utf-8"), {}
    for node in ast.parse(text).body:
        named = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
        for name in [node.name] if hasattr(node, "name") else named:
            found[name] = (node, text)
        for method in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(method, ast.FunctionDef):
                found[f"{node.name}::{method.name}"] = (method, text)
    return found


def test_text(path, test):
    """The text of a test, of the fixtures that it takes, and of the functions and constants that these name."""
    known, folder = definitions(path), path.parent
    while folder != REPOSITORY:
        for helpers in (folder / "support").glob("*.py") if folder.name == "tests" else ():
            known = definitions(helpers) | known
        if (folder / "conftest.py").is_file():
            known = definitions(folder / "conftest.py") | known
        folder = folder.parent
    taken = [test]
    for name in taken:
        node = known[name][0]
        named = [one.id for one in ast.walk(node) if isinstance(one, ast.Name)]
        named += [one.arg for one in node.args.args] if hasattr(node, "args") else []
        taken += [one for one in dict.fromkeys(named) if one in known and one not in taken]
    nodes = [known[name] for name in taken]
    first = [min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))]) for node, _ in nodes]
    return "\n".join(
        "\n".join(text.splitlines()[start - 1 : node.end_lineno])
        for start, (node, text) in zip(first, nodes, strict=True)
    )


test_text.__test__ = False


@pytest.mark.skipif(not (REPOSITORY / "packages").is_dir(), reason="outside the repository")
@pytest.mark.parametrize("name", SHOWN)
def test_what_a_run_shows_has_a_test_that_sets_the_flag(name):
    path, _, test = SHOWN[name].partition("::")
    text = test_text(REPOSITORY / path, test)
    assert name in text or FLAGS[name].dest in text, f"{SHOWN[name]} does not set {name}"


class AskedError(Exception):
    """A spy was called."""


def asked(**given):
    raise AskedError(given)


def started(settings, monkeypatch, **spies):
    """What `drive` calls a spy with, where nothing is started."""
    from slime_launch import run

    for name, spy in spies.items():
        monkeypatch.setattr(run, name, spy)
    checked = types.SimpleNamespace(settings=settings, manifest=None, weights=None, data_notes=())
    monkeypatch.setattr(run, "opening_lines", lambda checked, state: [])
    with pytest.raises(AskedError) as caught:
        run.drive(checked, Path("out"), RunConsole(io.StringIO()), Watch())
    return caught.value.args[0]


def test_tensorboard_is_left_out_on_request(workspace_here, monkeypatch):
    def tracker(directory, **given):
        raise AskedError(given)

    spies = {"start": lambda *given, **more: (None, None), "Tracker": tracker}
    found = [
        started(parse_train(f"{BASE} {more}".split()), monkeypatch, **spies)["tensorboard"]
        for more in ("", "--disable-tensorboard")
    ]
    assert found == [True, False]


def test_room_on_a_cluster_is_waited_for_as_long_as_given(workspace_here, monkeypatch):
    def place(layout, **given):
        raise AskedError(given)

    runtime = types.SimpleNamespace(cuda=False, check=lambda: None)
    spies = {"ray_runtime": lambda cluster, address: contextlib.nullcontext(runtime), "place_run": place}
    settings = parse_train(f"{BASE} --ray-placement-timeout 7".split())
    assert started(settings, monkeypatch, **spies)["timeout"] == 7


def test_a_verifier_has_the_memory_that_is_given(monkeypatch):
    from slime_rollout.rewards import scorers

    monkeypatch.setattr(scorers, "VerifierPool", lambda name, **given: asked(**given))
    words = f"{BASE} --rm-type math --rm-memory-limit 3".split()
    config = parse_train(words).rollout
    sample = Sample(index=0, group_index=0, prompt="p", tokens=[1], label="1")
    with pytest.raises(AskedError) as caught:
        asyncio.run(scorers.make_scorer(config, HookArgs({})).reward(sample))
    assert caught.value.args[0]["memory_limit"] == 3 * 2**30


def test_the_first_check_of_an_engine_waits_as_long_as_given(monkeypatch):
    from slime_rollout.engine import health

    slot = types.SimpleNamespace(now=types.SimpleNamespace(has_no_room=False))
    monitor = types.SimpleNamespace(
        _router=types.SimpleNamespace(now=types.SimpleNamespace()), _slots=[slot], _engines=[],
        _config=parse_train(f"{BASE} --use-fault-tolerance --rollout-health-check-first-wait 70".split()).engine,
        _thread=types.SimpleNamespace(start=lambda: None),
    )  # fmt: skip
    before = time.monotonic()
    health.FleetMonitor.start(monitor)
    assert 70 <= slot.now.due - before < 80


def test_the_kernel_that_accumulates_gradients_is_left_out_on_request(workspace_here, monkeypatch):
    from slime_megatron.model import megatron_configs

    monkeypatch.setattr(megatron_configs.layers, "_grad_accum_fusion_available", True)
    shape, device = ModelShape.from_hf_config("hf"), types.SimpleNamespace(is_cpu=False)
    found = [
        megatron_configs._transformer_values(shape, parse_train(f"{BASE} {more}".split()).megatron, device)
        for more in ("", "--no-gradient-accumulation-fusion")
    ]
    assert [values["gradient_accumulation_fusion"] for values in found] == [True, False]


@pytest.mark.parametrize("name", [flag.name for flag in SHAPE_FLAGS if flag.compared])
def test_a_shape_flag_that_contradicts_the_model_is_refused(name, workspace_here):
    """Of several families, and a model with biases, another activation and YaRN, one at least has another value."""
    plain = PUBLISHED["qwen3-0.6B"].shape
    odd = dataclasses.replace(plain, swiglu=False, gelu_tanh=True, add_bias_linear=True, rope_type="yarn")
    shapes = [odd, *(PUBLISHED[model].shape for model in ("glm4-9B", "deepseek-v3", "llama3.1-8B", "qwen3-30B-A3B"))]
    spec, refused = SHAPE[name], []
    given = parse_train([*BASE.split(), name, *([] if spec.is_switch else [WRONG.get(spec.type, "none")])]).shape
    for shape in (plain, *shapes):
        try:
            check_flags(shape, given)
        except ShapeMismatchError as error:
            refused.append(str(error))
    assert refused and all(name in line for line in refused)


def test_every_row_is_about_a_flag_and_none_is_twice():
    rows = [*HOW, *SHOWN]
    assert len(rows) == len(set(rows)) and set(rows) <= FLAGS.keys()
