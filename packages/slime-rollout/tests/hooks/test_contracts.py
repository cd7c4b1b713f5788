"""Every kind of hook, one that is good and one for each way of being wrong, as `check-hooks --run` calls them."""

import dataclasses
import json
import time

import pytest

from slime_core.errors import ConfigError, SlimeError
from slime_core.flags import flag_specs
from slime_core.hooks import HookArgs
from slime_rollout.config import RolloutConfig
from slime_rollout.hooks import HOOKS, check_hooks, contracts, given_hooks, hook_args_of
from slime_rollout.hooks.contracts import Trial, try_hook

LIMIT = 1.2
LEFT = 3.0  # how long one that hangs goes on: longer than it may, shorter than anybody waits

GENERATE = "custom_generate_function_path"
REWARD = "custom_rm_path"
KEEP = "dynamic_sampling_filter_path"
SOURCE = "data_source_path"
PICK = "buffer_filter_path"
EACH = "rollout_sample_hook_path"

START = (
    "import asyncio, time\n"
    "from slime_core.types import Drop, Keep\n"
    "from slime_rollout.data import RolloutDataSource, RolloutDataSourceWithBuffer\n"
)


def source_class(method, base="RolloutDataSource"):
    return f"class hook({base}):\n    {method}\n"


def of_class(body):
    return f"class hook:\n    def __init__(self): pass\n    {body}\n"


BUFFERED = {SOURCE: "slime_rollout.data.RolloutDataSourceWithBuffer"}
GROUP = {"group_rm": True}
SCORES = "[float(one.index % 2) for one in samples]"

# Kind → its flag, further settings, and by case: the hook, and what is said of it ("" for a good one).
KINDS = {
    "generate a sample": (
        GENERATE,
        {},
        {
            "good": ("async def hook(args, sample, sampling_params): sample.response = 'a'", ""),
            "wrong arity": ("async def hook(args, sample): pass", r"takes \(args, sample\); write"),
            "wrong return": ("async def hook(args, sample, sampling_params): return 7", "returned '7' for sample 0"),
            "raising": (
                "async def hook(args, sample, sampling_params): 1 / 0",
                "raised ZeroDivisionError for sample 0",
            ),
            "hanging": (
                "async def hook(args, sample, sampling_params): await asyncio.sleep(3600)",
                "took more than 0.3 s for sample 0",
            ),
            "blocking": (f"async def hook(args, sample, sampling_params): time.sleep({LEFT})", "it hangs"),
            "not async": ("def hook(args, sample, sampling_params): pass", "is not async"),
        },
    ),
    "generate a group": (
        GENERATE,
        {},
        {
            "good": (
                "async def hook(args, samples, evaluation=False):\n"
                "    for one in samples: one.response = 'a'\n    return samples",
                "",
            ),
            "wrong arity": ("async def hook(args, samples, more): pass", r"takes \(args, samples, more\); write"),
            "wrong return": ("async def hook(args, samples): return {}", "returned '{}' for samples 0 to 1"),
            "raising": ("async def hook(args, samples): 1 / 0", "raised ZeroDivisionError for 2 samples"),
            "hanging": (
                "async def hook(args, samples): await asyncio.sleep(3600)",
                "took more than 0.3 s for 2 samples",
            ),
            "not async": ("def hook(args, samples): return samples", "is not async"),
        },
    ),
    "reward a sample": (
        REWARD,
        {},
        {
            "good": ("async def hook(args, sample): return 0.5", ""),
            "wrong arity": ("async def hook(args): return 0.5", r"takes \(args\); it is called with 2 arguments"),
            "wrong return": ("async def hook(args, sample): return 'good'", "returned 'good' for sample 0"),
            "raising": ("async def hook(args, sample): 1 / 0", "raised ZeroDivisionError for sample 0"),
            "hanging": ("async def hook(args, sample): await asyncio.sleep(3600)", "took more than 0.3 s for sample 0"),
            "blocking": (f"async def hook(args, sample): time.sleep({LEFT})", "took more than 0.3 s for sample 0"),
            "not async": ("def hook(args, sample): return 0.5", ""),
            "not async, hanging": (f"def hook(args, sample): time.sleep({LEFT})", "took more than 0.3 s for sample 0"),
        },
    ),
    "reward several samples": (
        REWARD,
        {},
        {
            "good": (f"async def hook(args, samples): return {SCORES}", ""),
            "wrong arity": ("async def hook(args, samples, more): pass", "it is called with 2 arguments"),
            "wrong return": ("async def hook(args, samples): return [1.0]", r"returned \[1.0\] for 4 samples, 0 to 3"),
            "raising": ("async def hook(args, samples): 1 / 0", "raised ZeroDivisionError for 4 samples"),
            "hanging": (
                "async def hook(args, samples): await asyncio.sleep(3600)",
                "took more than 0.3 s for 4 samples",
            ),
            "not async": (f"def hook(args, samples): return {SCORES}", ""),
        },
    ),
    "reward a group": (
        REWARD,
        GROUP,
        {
            "good": ("async def hook(args, group): return [0.5 for sample in group]", ""),
            "wrong arity": ("async def hook(group): pass", "it is called with 2 arguments"),
            "wrong return": ("async def hook(args, group): return 1.0", "returned 1.0 for 2 samples, 0 to 1"),
            "raising": ("async def hook(args, group): 1 / 0", "raised ZeroDivisionError for 2 samples"),
            "hanging": ("async def hook(args, group): await asyncio.sleep(3600)", "took more than 0.3 s for 2 samples"),
            "not async": ("def hook(args, group): return [0.5 for sample in group]", ""),
        },
    ),
    "reward by a class": (
        REWARD,
        {},
        {
            "good": (of_class("def compute_reward(self, prompts, responses): return [0.5 for one in responses]"), ""),
            "wrong arity": (of_class("def compute_reward(self, prompts): pass"), "called as compute_reward"),
            "wrong return": (of_class("def compute_reward(self, prompts, responses): return 7"), "returned 7 for 4"),
            "raising": (of_class("def compute_reward(self, prompts, responses): 1 / 0"), "raised ZeroDivisionError"),
            "hanging": (
                of_class(f"def compute_reward(self, prompts, responses): time.sleep({LEFT})"),
                "took more than 0.3 s for 4 samples",
            ),
            "async": (
                of_class("async def compute_reward(self, prompts, responses): return [0.5] * len(responses)"),
                "",
            ),
        },
    ),
    "keep a group": (
        KEEP,
        {},
        {
            "good": ("def hook(args, group): return Keep() if group[0].reward else Drop('low')", ""),
            "wrong arity": ("def hook(group): return True", r"takes \(group\); it is called with 2 arguments"),
            "wrong return": ("def hook(args, group): return 'yes'", "returned 'yes'; return Keep"),
            "raising": ("def hook(args, group): 1 / 0", "raised ZeroDivisionError for group 0"),
            "hanging": (f"def hook(args, group): time.sleep({LEFT})", "it was not done after 1.2 s; it hangs"),
            "async": ("async def hook(args, group): return True", "is async; it decides about scored groups at once"),
        },
    ),
    "source of groups": (
        SOURCE,
        {},
        {
            "good": (source_class("pass"), ""),
            "wrong arity": (source_class("def get_samples(self): pass"), r"get_samples takes \(self\)"),
            "wrong return": (
                source_class("def get_samples(self, num_samples): return 'x'"),
                r"get_samples\(3\) returned x; return a list of 3 groups",
            ),
            "too few": (
                source_class("def get_samples(self, num_samples): return super().get_samples(num_samples)[1:]"),
                r"get_samples\(3\) returned .*; return a list of 3 groups",
            ),
            "forgetful": (
                source_class("def state_dict(self): return super().state_dict() | {'position': 0}"),
                "it hands out other groups than without that",
            ),
            "raising": (source_class("def get_samples(self, num_samples): 1 / 0"), "it raised ZeroDivisionError"),
            "hanging": (
                source_class(f"def get_samples(self, num_samples): time.sleep({LEFT})"),
                "it was not done after 1.2 s; it hangs",
            ),
            "no source": (
                "class hook: pass",
                "is not a class with get_samples, .* derive it from slime_rollout.data",
            ),
        },
    ),
    "choose from the buffer": (
        PICK,
        BUFFERED,
        {
            "good": ("def hook(args, buffer, num_samples): return buffer[-num_samples:]", ""),
            "wrong arity": ("def hook(args, buffer): pass", r"takes \(args, buffer\); it is called with 3 arguments"),
            "wrong return": ("def hook(args, buffer, num_samples): return None", "returned NoneType; return a list"),
            "raising": ("def hook(args, buffer, num_samples): 1 / 0", "raised ZeroDivisionError: division by zero"),
            "hanging": (
                f"def hook(args, buffer, num_samples): time.sleep({LEFT})",
                "it was not done after 1.2 s; it hangs",
            ),
            "async": ("async def hook(args, buffer, num_samples): return []", "is async; choosing from the buffer"),
        },
    ),
}
SEEN = {  # hooks that see a whole rollout: their arguments, what a good one does, and one that returns what it may not
    "rollout_sample_filter_path": (
        "args, groups",
        "groups[0][0].remove_sample = True",
        "return groups",
        "returned a list",
    ),
    "rollout_all_samples_process_path": (
        "args, all_groups, get_samples",
        "get_samples(1)",
        "return 7",
        "returned a int",
    ),
    "custom_reward_post_process_path": (
        "args, samples",
        "return [one.reward for one in samples], [0.5] * len(samples)",
        "return [one.reward for one in samples]",
        "return two lists of 4 finite numbers",
    ),
    "rollout_data_postprocess_path": (
        "args, rollout_id, rollout_data",
        "rollout_data['loss_masks'][0][:] = 0\n    rollout_data['own'] = [rollout_id] * 4",
        "rollout_data['loss_masks'][0] = [1]",
        "write [0-9]+ numbers, one a response token",
    ),
    "custom_rollout_log_function_path": (
        "rollout_id, args, samples, extra_metrics, rollout_time",
        "extra_metrics['own'] = len(samples)\n    return True",
        "return 7",
        "return True to leave out",
    ),
    "custom_eval_rollout_log_function_path": (
        "rollout_id, args, data, extra_metrics",
        "extra_metrics['own'] = sum(data['trial']['rewards'])",
        "extra_metrics['own'] = 'text'",
        "set the metric own to 'text'; give numbers",
    ),
}
KINDS |= {
    field: (
        field,
        {},
        {
            "good": (f"def hook({arguments}):\n    {good}", ""),
            "wrong arity": ("def hook(args): pass", r"takes \(args\); it is called with"),
            "wrong return": (f"def hook({arguments}): {wrong}", message),
            "raising": (f"def hook({arguments}): 1 / 0", "raised ZeroDivisionError"),
            "hanging": (f"def hook({arguments}): time.sleep({LEFT})", "it hangs"),
            "async": (f"async def hook({arguments}): pass", "is async"),
        },
    )
    for field, (arguments, good, wrong, message) in SEEN.items()
}
KINDS["see each sample"] = (
    EACH,
    {},
    {
        "good": ("async def hook(args, sample, *, evaluation): sample.loss_mask = [0] * sample.response_length", ""),
        "wrong arity": ("def hook(args, sample, more): pass", r"takes \(args, sample, more\); it is called as"),
        "wrong return": ("def hook(args, sample, rollout_id): return 7", "returned '7' for sample"),
        "raising": ("def hook(args, sample): 1 / 0", "raised ZeroDivisionError"),
        "hanging": (f"def hook(args, sample): time.sleep({LEFT})", "it hangs"),
    },
)
WHOLE = "args, rollout_id, data_source, evaluation=False"
ALL_DONE = """
    groups = data_source.get_samples(args.rollout_batch_size)
    for one in sum(groups, []): one.tokens, one.response_length, one.reward, one.status = [1, 2], 1, 0.5, 'completed'
    return groups"""
KINDS["make a rollout"] = (
    "rollout_function_path",
    {},
    {
        "good": (f"def hook({WHOLE}):{ALL_DONE}", ""),
        "async": (f"async def hook({WHOLE}):{ALL_DONE}", ""),
        "wrong arity": ("def hook(args, rollout_id): pass", r"takes \(args, rollout_id\); it is called as"),
        "wrong return": (f"def hook({WHOLE}): return 7", "returned 7; return a list of groups"),
        "too few": (f"def hook({WHOLE}): return []", "returned 0 groups; return --rollout-batch-size 2"),
        "not ready": (f"def hook({WHOLE}): return data_source.get_samples(2)", "is not ready: set tokens"),
        "raising": (f"def hook({WHOLE}): 1 / 0", "raised ZeroDivisionError"),
        "hanging": (f"def hook({WHOLE}): time.sleep({LEFT})", "needs a higher --custom-generate-timeout"),
        "hanging async": (f"async def hook({WHOLE}): await asyncio.sleep({LEFT})", "raise --custom-generate-timeout"),
    },
)
KINDS["make an evaluation"] = (
    "eval_function_path",
    {},
    {
        "good": (f"def hook({WHOLE}): return {{'held': {{'rewards': [0, 1], 'truncated': [False, True]}}}}", ""),
        "wrong arity": ("def hook(args): pass", r"takes \(args\); it is called as"),
        "wrong return": (f"def hook({WHOLE}): return []", "return a mapping from held-out set"),
        "no rewards": (f"def hook({WHOLE}): return {{'held': 0.5}}", "return finite numbers as its rewards"),
        "raising": (f"def hook({WHOLE}): 1 / 0", "raised ZeroDivisionError"),
        "hanging": (f"def hook({WHOLE}): time.sleep({LEFT})", "needs a higher --custom-generate-timeout"),
        "training prompts": (f"def hook({WHOLE}): data_source.get_samples(1)", "belongs to a call that is over"),
    },
)
CASES = [
    pytest.param(flag, more, *what, id=f"{kind}: {case}")
    for kind, (flag, more, cases) in KINDS.items()
    for case, what in cases.items()
]


@pytest.fixture(scope="module")
def trial():
    config = RolloutConfig.of(hf_checkpoint="", prompt_data="none", rollout_batch_size=2)
    made = Trial.make(config, HookArgs({}), has_model=False, has_prompts=False, time_limit=60)
    made.tokenizer.apply_chat_template([{"role": "user", "content": "warm up"}], tokenize=False)
    return made


GENERATING = {"custom_generate_function_path", "rollout_function_path", "eval_function_path"}


@pytest.mark.parametrize(("field", "more", "source", "message"), CASES)
def test_contract(trial, tmp_path, field, more, source, message):
    (tmp_path / "own.py").write_text(START + source + "\n")
    path = f"{tmp_path}/own.py:hook"
    limit = 0.3 if "sleep(" in source else 60.0  # a good one may be slow to begin on a busy machine
    own = {field: (path,) if field == EACH else path, "rm_timeout": limit, **more}
    own |= {"custom_generate_timeout": limit} if {*own} & GENERATING else {}
    own |= {"eval_prompt_data": ("held", "held.jsonl")} if "eval" in field else {}
    config = trial.config.changed(**own)
    args = HookArgs.from_configs(config)
    hook = next(hook for hook in given_hooks(config) if hook.kind.field == field)
    mine = dataclasses.replace(trial, args=args, time_limit=LIMIT if "it hangs" in message else 60.0)
    start = time.monotonic()
    if not message:
        check_hooks(config, args)
        assert try_hook(hook, mine)
        return
    with pytest.raises(SlimeError, match=message) as caught:
        try_hook(hook, mine)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start < LEFT


def test_no_kind_of_hook_is_left_out():
    fields = {spec.dest for spec in flag_specs(RolloutConfig) if spec.dest.endswith("_path")} - {"custom_config_path"}
    assert fields == {hook.field for hook in HOOKS} == {flag for flag, _, _ in KINDS.values()}
    for _, _, cases in KINDS.values():
        assert {"good", "wrong arity", "wrong return", "raising", "hanging"} <= cases.keys()


def test_held_out_sets_have_hooks_of_their_own(trial, tmp_path):
    (tmp_path / "own.py").write_text("async def good(args, sample, sampling_params): sample.response = 'a'\n")
    sets = [{"name": "a", "path": "a.jsonl"}, {"name": "b", "path": "b.jsonl", GENERATE: f"{tmp_path}/own.py:good"}]
    sets.append({"name": "c", "path": "c.jsonl", REWARD: f"{tmp_path}/own.py:none"})
    (tmp_path / "eval.yaml").write_text(json.dumps({"eval": {"datasets": sets}}))
    config = trial.config.changed(eval_config=f"{tmp_path}/eval.yaml")
    assert [hook.of for hook in given_hooks(config)] == ["held-out set b: ", "held-out set c: "]
    assert "4 samples became 4" in try_hook(given_hooks(config)[0], trial)
    with pytest.raises(ConfigError, match=r"held-out set c: --custom-rm-path .*own.py has no function none"):
        check_hooks(config, trial.args)


def test_without_hooks_nothing_is_looked_at(trial):
    assert given_hooks(trial.config) == []
    check_hooks(trial.config, trial.args)


def test_one_that_blocks_for_a_while_is_told(trial, tmp_path, monkeypatch):
    monkeypatch.setattr(contracts, "_BLOCKED_SECONDS", 0.1)
    source = "async def hook(args, sample, sampling_params): time.sleep(0.15); sample.response = 'a'\n"
    (tmp_path / "own.py").write_text(START + source)
    config = trial.config.changed(**{GENERATE: f"{tmp_path}/own.py:hook"})
    (hook,) = given_hooks(config)
    said = try_hook(hook, dataclasses.replace(trial, args=HookArgs.from_configs(config)))
    assert "nothing else could run for" in said and "await what takes time" in said
    assert "responses were set as text, so no engine's log-probs are known" in said


def test_parameters_of_a_file_are_arguments(tmp_path):
    config = RolloutConfig.of(
        hf_checkpoint="m", prompt_data="p", rollout_batch_size=2, custom_config_path=str(tmp_path / "own.yaml")
    )
    (tmp_path / "own.yaml").write_text("max_calls: 3\nurls: [a, b]\n")
    args = hook_args_of(config)
    assert (args.max_calls, args.urls, args.rollout_batch_size) == (3, ["a", "b"], 2)
    assert hook_args_of(config, {"lr": 1.0}).lr == 1.0
    for text, message in (
        ("max_turns: 3", "which are flags; give --max-turns, or rename"),
        ("- 3", "is not a mapping from names"),
        ("a b: 3", "is not a mapping from names"),
        ("{", "invalid YAML"),
    ):
        (tmp_path / "own.yaml").write_text(text)
        with pytest.raises(ConfigError, match=message):
            hook_args_of(config)
