import asyncio

import pytest

from slime_core.errors import DataError
from slime_core.hooks import HookArgs
from slime_core.types import Sample
from slime_rollout import errors
from slime_rollout.config import RolloutConfig
from slime_rollout.data.files import RawRow
from slime_rollout.data.rows import check_row
from slime_rollout.errors import RewardError
from slime_rollout.eval_sets import read_eval_sets
from slime_rollout.http import HttpError
from slime_rollout.rewards import scorers
from slime_rollout.rewards.scorers import RemoteReward, RowRuleReward, Scorers

LOOP = asyncio.Runner()  # one event loop for all calls, as in a run
WITHOUT_RULES = 4  # rm_workers' default, since no rule of ours is asked
GIVEN = {"hf_checkpoint": "m", "prompt_data": "p", "rollout_batch_size": 1}


def config(**changes):
    return RolloutConfig.of(**GIVEN | {"rm_workers": 1} | changes)


def sample(response, label="2", rule=None, **metadata):
    metadata |= {} if rule is None else {"rm_type": rule}
    return Sample(index=3, group_index=0, prompt="1 + 1 =", label=label, response=response, metadata=metadata)


def score(reward, *samples):
    async def all_of_them():
        return await asyncio.gather(*(reward(one) for one in samples))

    return LOOP.run(asyncio.wait_for(all_of_them(), 60))


def row(rule, label="2", **changes):
    value = {"prompt": "1 + 1 =", "label": label, "metadata": {"rm_type": rule}}
    return check_row(RawRow(where="p.jsonl:7", value=value), config(**changes))


def test_a_row_chooses_its_rule():
    reward = RowRuleReward(config(rm_type="exact", reward_key="score"), {})
    given = [
        sample("2"),
        sample("2", rule=""),
        sample(r"\boxed{\frac42}", rule="math"),
        sample("Answer: 3", rule="dapo"),
        sample(r"so \boxed{2}", rule="boxed_exact"),
        sample("2.", rule="first_integer"),
        sample(r"\boxed{2}"),
    ]
    assert score(reward, *given) == [1.0, 1.0, 1.0, {"score": -1.0, "acc": 0.0}, 1.0, 1.0, 0.0]


def test_an_own_function_and_a_teacher_alone_come_before_it(tmp_path):
    (tmp_path / "own.py").write_text("def custom_rm(args, sample): return 0.25\n")
    own = config(custom_rm_path=f"{tmp_path}/own.py", rm_workers=WITHOUT_RULES)
    assert score(Scorers(own, HookArgs({})).of(own).reward, sample("2", rule="exact")) == [0.25]
    alone = config(opd_type="sglang", rm_url="http://a")
    assert score(Scorers(alone, HookArgs({})).of(alone).reward, sample("2", rule="exact")) == [0.0]
    assert row("telepathy", custom_rm_path="a.b", rm_workers=WITHOUT_RULES).metadata == {"rm_type": "telepathy"}


@pytest.mark.parametrize("rule", ["telepathy", 5, ["math"], {"a": 1}])
def test_an_unknown_rule_is_told_with_its_row_or_its_sample(rule):
    with pytest.raises(DataError, match=r"^p\.jsonl:7: the metadata's rm_type is .*; allowed: exact, ") as caught:
        row(rule)
    assert repr(rule) in str(caught.value)
    with pytest.raises(DataError, match=r"^sample 3: the metadata's rm_type is .*; allowed: exact, "):
        score(RowRuleReward(config(), {}), sample("2", rule=rule))


def test_labels_are_checked_for_the_rule_of_their_row():
    assert row("random", label=None, rm_type="math").label is None
    assert row("exact", label="four", rm_type="first_integer").label == "four"
    with pytest.raises(DataError, match=r"^p\.jsonl:7: the label 'four' has no integer first, which the metadata"):
        row("first_integer", label="four", rm_type="exact")
    with pytest.raises(DataError, match=r"^p\.jsonl:7: no label, which the metadata's rm_type math compares with"):
        row("math", label=None, rm_type="random")


def test_what_a_rule_needs_of_the_run_is_told_with_the_row():
    with pytest.raises(DataError, match=r"^p\.jsonl:7: .*dapo, which gives score .* choose one with --reward-key"):
        row("boxed_dapo")
    assert row("dapo", reward_key="acc").label == "2"
    with pytest.raises(DataError, match=r"^p\.jsonl:7: .*no service is known; give --rm-type remote_rm"):
        row("remote_rm")
    with pytest.raises(DataError, match=r"^sample 3: its rule remote_rm needs --rm-type remote_rm with --rm-url"):
        score(RowRuleReward(config(), {}), sample("2", rule="remote_rm"))
    remote = {"rm_type": "remote_rm", "rm_url": "http://a"}
    assert row("boxed_remote_rm", **remote).label == "2"
    assert row("exact", **remote).label == "2"


def test_processes_are_made_once_for_each_rule_of_a_run_and_its_held_out_sets(tmp_path, monkeypatch):
    made, make = [], scorers.VerifierPool
    monkeypatch.setattr(scorers, "VerifierPool", lambda target, **limits: made.append(target) or make(target, **limits))
    (tmp_path / "sets.yaml").write_text("eval: {datasets: {a: {path: x, rm_type: f1}, b: {path: x, rm_type: math}}}")
    given = config(rm_type="math", eval_config=str(tmp_path / "sets.yaml"))
    sets = read_eval_sets(given)
    shared = Scorers(given, HookArgs({}), sets)
    rewards = [shared.of(one).reward for one in (given, *(held_out.config for held_out in sets))]
    assert made == []
    for reward in rewards:
        assert score(reward, sample(r"\boxed{2}", rule="math"), sample("2", rule="f1")) == [1.0, 1.0]
    assert sorted(made) == ["f1", "math"]


def test_a_rule_has_the_time_limit_of_its_kind(monkeypatch):
    limits = {}
    monkeypatch.setattr(scorers, "VerifierPool", lambda target, **given: limits.update({target: given["time_limit"]}))
    reward = RowRuleReward(config(rm_type="remote_rm", rm_url="http://a"), {})
    assert score(reward, sample(r"\boxed{2}", rule="math"), sample("2", rule="f1")) == [1.0, 1.0]
    assert limits == {"math": 10.0, "f1": 10.0}


@pytest.mark.parametrize(
    ("response", "sent"), [(r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"), ("no box", ""), (r"\boxed{}", "")]
)
def test_a_boxed_answer_is_all_that_a_service_sees(monkeypatch, response, sent):
    asked = []

    async def ask(service, payload, *, most):
        asked.append(payload)
        return 1.0

    monkeypatch.setattr("slime_rollout.http.Service.ask", ask)
    reward = RowRuleReward(config(rm_type="boxed_remote_rm", rm_url="http://a"), {})
    assert score(reward, sample(response)) == [1.0]
    assert score(RemoteReward("http://a", timeout=1.0), sample(response)) == [1.0]
    assert [body["response"] for body in asked] == [sent, response]


def test_a_service_may_fail_for_half_an_hour_and_then_ends_the_run_once_256_samples_failed(monkeypatch):
    now, works = [50.0], [False]

    async def ask(service, payload, *, most):
        if works[0]:
            return 1.0
        raise HttpError("POST", "http://a", 503, "it starts")

    monkeypatch.setattr("slime_rollout.http.Service.ask", ask)
    monkeypatch.setattr(errors.time, "monotonic", lambda: now[0])
    reward = RowRuleReward(config(rm_type="remote_rm", rm_url="http://a"), {})
    assert score(reward, *[sample("1")] * 2000) == [0.0] * 2000
    now[0] += 1799.0
    assert score(reward, *[sample("1")] * 2000) == [0.0] * 2000
    works[0] = True
    assert score(reward, sample("1")) == [1.0]
    works[0] = False
    now[0] += 86400.0
    assert score(reward, *[sample("1")] * 200) == [0.0] * 200
    now[0] += 86400.0
    assert score(reward, *[sample("1")] * 55) == [0.0] * 55
    with pytest.raises(RewardError) as caught:
        score(reward, sample("1"))
    assert str(caught.value).startswith(
        "the service of --rm-url http://a has failed 256 times in a row, for 1440 min; at last: POST http://a: HTTP 503"
    )
