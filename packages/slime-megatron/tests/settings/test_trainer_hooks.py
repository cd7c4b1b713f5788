"""User-defined functions that a rank calls before its models, its log-probs and its steps."""

import json

import pytest

from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError
from slime_core.hooks import HookArgs
from slime_megatron.service import check_algorithm
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.settings.overrides import role_config
from slime_megatron.settings.trainer_hooks import BEFORE_LOG_PROBS, BEFORE_TRAIN_STEP, HOOKS, INIT

OWN = """
import json

import torch
import torch.distributed as dist


def note(args, name, **seen):
    with open(f"{args.notes}/{dist.get_rank()}", "a", encoding="utf-8") as file:
        print(json.dumps({"hook": name, **seen}), file=file)


def init(args):
    note(args, "init", ranks=dist.get_world_size())


def total(model):
    return sum(float(weight.detach().double().sum()) for chunk in model for weight in chunk.parameters())


def log_probs(args, model, store_prefix):
    note(args, "log_probs", prefix=store_prefix, total=total(model))


def step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    empty = all(not buffer.grad_data.any() for chunk in model for buffer in chunk.buffers)
    done = opt_param_scheduler.num_steps
    note(args, "step", at=[rollout_id, step_id], empty=empty, total=total(model), done=done)
    with torch.no_grad():
        for group in optimizer.param_groups:
            group["lr"] = args.rates[step_id]


def broken(args):
    raise KeyError("no such plugin")
"""
NAMES = {INIT: "init", BEFORE_LOG_PROBS: "log_probs", BEFORE_TRAIN_STEP: "step"}


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    return {name: f"{tmp_path}/own.py:{function}" for name, function in NAMES.items()}


def test_every_rank_calls_them_in_order_with_what_it_works_with(
    ranks, tiny_model, tiny_config, make_samples, make_shards, own, tmp_path
):
    """The reference's pass has its weights also when the policy's have moved, and a hook can change a step.

    Given are custom_megatron_init_path, custom_megatron_before_log_prob_hook_path and
    custom_megatron_before_train_step_hook_path.
    """
    model = tiny_model("qwen3")
    algorithm = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1)
    args = HookArgs({"notes": str(tmp_path), "rates": [1e-3, 0.0]})
    ranks.start(2, tiny_config(load=model.checkpoint, **own), model.shape, algorithm, args=args)
    reports = [
        ranks.first("train", make_shards(make_samples(groups=4), data_parallel=2, steps=2, rollout_id=number))
        for number in (5, 6)
    ]
    for rank in (0, 1):
        seen = [json.loads(line) for line in (tmp_path / str(rank)).read_text().splitlines()]
        assert seen[0] == {"hook": "init", "ranks": 2}
        a_rollout = ["ref_", "", "step", "step"]
        assert [one.get("prefix", one["hook"]) for one in seen[1:]] == a_rollout * 2
        steps = [one for one in seen if one["hook"] == "step"]
        assert [(*one["at"], one["done"], one["empty"]) for one in steps] == [
            (number, step, count, True) for count, (number, step) in enumerate([(5, 0), (5, 1), (6, 0), (6, 1)])
        ]
        first, second = ([one["total"] for one in seen if one.get("prefix") == prefix] for prefix in ("ref_", ""))
        assert first[0] == first[1] == second[0] != second[1]
        assert [one["total"] for one in steps] == [second[0], second[1], second[1], steps[3]["total"]]
    assert [step["lr"] for report in reports for step in report.steps] == [1e-3, 0.0] * 2


def test_a_hook_that_raises_is_named(ranks, tiny_model, tiny_config, own, tmp_path, rank_error):
    model = tiny_model("qwen3")
    config = tiny_config(load=model.checkpoint, custom_megatron_init_path=f"{tmp_path}/own.py:broken")
    with pytest.raises(rank_error, match="--custom-megatron-init-path raised KeyError: 'no such plugin'"):
        ranks.start(1, config, model.shape)


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_takes_other_arguments_is_refused_before_a_run(name, own, tmp_path):
    check_algorithm(AlgorithmConfig(), MegatronConfig(**own))
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} .* it is called with {len(HOOKS[name])} arg"):
        check_algorithm(AlgorithmConfig(), MegatronConfig(**{name: f"{tmp_path}/own.py:note"}))


def test_log_probs_that_nothing_computes_need_no_hook(own):
    config = MegatronConfig(**{BEFORE_LOG_PROBS: own[BEFORE_LOG_PROBS]})
    check_algorithm(AlgorithmConfig(loss_type="dpo_loss"), config)
    with pytest.raises(ConfigError, match=r"--custom-megatron-before-log-prob-hook-path .* has no effect"):
        check_algorithm(AlgorithmConfig(loss_type="sft_loss"), config)


def test_a_hook_is_of_all_roles():
    with pytest.raises(ConfigError, match="custom_megatron_init_path is the same for all roles"):
        role_config(MegatronConfig(), "critic", {"critic": {INIT: "a.b"}})
