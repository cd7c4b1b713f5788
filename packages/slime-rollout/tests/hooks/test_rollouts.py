"""Hooks around a rollout change what it gives."""

import pytest

from slime_core.errors import ConfigError
from slime_rollout.hooks.rollouts import HOOKED

SOURCE = """
seen = []

def mark(args, sample, rollout_id, evaluation):
    sample.metadata["mark"] = [rollout_id, evaluation]

async def answer(args, sample):
    sample.response = sample.label

def remove(args, groups):
    for group in groups:
        group[0].remove_sample = True

def drop_first(args, group):
    return group[0].group_index > 0

def look(args, all_groups, get_samples):
    seen.extend(group[0].group_index for group in all_groups)
    seen.append(get_samples(1)[0][0].prompt)

def log(rollout_id, args, samples, extra_metrics, rollout_time):
    extra_metrics["mine"] = rollout_id + len(samples)
    return rollout_time > 0

def log_eval(rollout_id, args, data, extra_metrics):
    extra_metrics["eval/mine"] = sum(data["held"]["rewards"])
    return True
"""


@pytest.fixture
def hook(tmp_path):
    (tmp_path / "around.py").write_text(SOURCE)
    return lambda name: f"{tmp_path}/around.py:{name}"


def test_samples_are_seen_before_they_are_scored(manager, hook):
    plain = manager().generate(0)
    batch = manager(rollout_sample_hook_path=(hook("mark"), hook("answer"))).generate(0)
    assert [sample.metadata["mark"] for sample in batch.samples] == [[0, False]] * 6
    assert [sample.reward for sample in batch.samples] == [1.0] * 6 != [sample.reward for sample in plain.samples]
    assert all(sample.metadata[HOOKED] for sample in batch.samples)


def test_samples_are_taken_out_of_training(manager, hook):
    batch = manager(rollout_sample_filter_path=hook("remove")).generate(0)
    assert [sample.remove_sample for sample in batch.samples] == [True, False, False] * 2


def test_dropped_groups_are_seen_and_the_ledger_balances(manager, hook):
    given = manager(dynamic_sampling_filter_path=hook("drop_first"), rollout_all_samples_process_path=hook("look"))
    batch = given.generate(0)
    kept = [group[0].group_index for group in batch.groups]
    seen = given._hooks._all._function.__globals__["seen"]
    assert 0 not in kept and sorted(seen[:-1]) == sorted([0, *kept])
    assert seen[-1].startswith("say a number")
    assert [[sample.group_index for sample in group] for group in batch.dropped.values()] == [[0] * 3]
    assert given.source.check_ledger() is None


def test_functions_log_in_place_of_the_usual_metrics(manager, hook):
    given = manager(
        custom_rollout_log_function_path=hook("log"),
        custom_eval_rollout_log_function_path=hook("log_eval"),
        eval_prompt_data=("held", manager()._config.data.prompt_data),
    )
    metrics = given.generate(3).metrics
    assert metrics["mine"] == 9 and "raw_reward" not in metrics and "response_tokens" in metrics
    report = given.evaluate(0)
    assert report.metrics == {"eval/mine": 6 * report.scores["held"]}


def test_a_wrong_function_is_refused_before_anything_is_generated(manager, hook):
    with pytest.raises(ConfigError, match=r"takes .*; it is called as"):
        manager(rollout_sample_hook_path=(hook("log"),))
    with pytest.raises(ConfigError, match="it is called with 2 arguments"):
        manager(rollout_sample_filter_path=hook("log"))
