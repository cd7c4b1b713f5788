"""Every answer of graded_answers.jsonl, read as a row of a prompt file and scored, next to upstream slime's verdict."""

import json
from collections import Counter
from pathlib import Path

import pytest

from slime_rollout.config import RolloutConfig
from slime_rollout.data.files import RawRow
from slime_rollout.data.rows import check_row
from slime_rollout.reward_config import COMPARING_RULES
from slime_rollout.rewards import find_rule

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "rewards.md"
LINES = (HERE / "graded_answers.jsonl").read_text(encoding="utf-8").splitlines()
ANSWERS = [json.loads(line) for line in LINES if not line.startswith("#")]


def score(answer):
    key = "score" if "dapo" in answer["rule"] else None
    config = RolloutConfig.of(
        hf_checkpoint="none", prompt_data="p", rollout_batch_size=1, rm_type=answer["rule"], reward_key=key
    )
    value = {"prompt": "?", "label": answer["label"], "metadata": answer.get("metadata", {})}
    row = check_row(RawRow(where="row 1", value=json.dumps(value).encode()), config)
    reward = find_rule(answer["rule"]).score(answer["response"], row.label, row.metadata)
    return reward["score"] if key else reward


@pytest.mark.timeout(120)
def test_every_answer_is_scored_as_the_table_says():
    found = [(answer, reward) for answer in ANSWERS if (reward := score(answer)) != pytest.approx(answer["ours"])]
    assert found == []


def test_the_table_has_many_different_answers_of_each_of_upstreams_rules():
    assert len({json.dumps({**answer, "ours": 0}) for answer in ANSWERS}) == len(ANSWERS) >= 300
    counts = Counter(answer["rule"].removeprefix("boxed_") for answer in ANSWERS)
    assert set(counts) == set(COMPARING_RULES) - {"exact", "first_integer", "gsm8k", "em"}
    assert min(counts.values()) >= 10
    for rule in ("math", "dapo", "gpqa"):
        assert len({answer["ours"] for answer in ANSWERS if answer["rule"] == rule}) == 2


def test_upstreams_verdict_is_given_or_the_page_says_why_not():
    page = PAGE.read_text(encoding="utf-8")
    for answer in ANSWERS:
        assert ("why" in answer) == (answer["ours"] != answer["upstream"]), answer
        assert "why" not in answer or f"| {answer['why']} |" in page, answer
