import asyncio

import pytest

from slime_core.errors import ConfigError
from slime_core.hooks import HookArgs
from slime_core.types import Sample
from slime_rollout.config import RolloutConfig
from slime_rollout.rewards import make_scorer

SOURCE = """
def named(completions, answer, **kwargs):
    return [float(text == right) for text, right in zip(completions, answer)]

def plain(prompts, completions, difficulty):
    return [len(text) + level for text, level in zip(completions, difficulty)]

async def chat(prompts, completions, completion_ids, **kwargs):
    assert prompts[0][-1]["role"] == "user" and completion_ids[0] == [8, 9]
    return [float(turns[0]["content"] == "4") for turns in completions]

def unnamed(completions, /): return []
"""


@pytest.fixture
def score(tmp_path):
    (tmp_path / "trl.py").write_text(SOURCE)

    def run(name, *samples, label_key="answer"):
        path = f"{tmp_path}/trl.py:{name}"
        config = RolloutConfig.of(hf_checkpoint="m", prompt_data="p", rollout_batch_size=1, custom_rm_path=path)
        scorer = make_scorer(config, HookArgs({"label_key": label_key}), strict=True)

        async def all_of():
            return await asyncio.gather(*map(scorer.reward, samples))

        return asyncio.run(all_of())

    return run


def sample(index, response, **more):
    return Sample(index=index, group_index=0, response=response, **({"prompt": "2 + 2 ="} | more))


def test_columns_are_labels_and_metadata_under_their_names(score):
    right, wrong = sample(0, "4", label="4"), sample(1, "5", label="4")
    assert score("named", right, wrong) == [1.0, 0.0]
    assert score("named", right, wrong, label_key="reward_model.answer") == [1.0, 0.0]
    easy, hard = (
        sample(0, "4", metadata={"difficulty": 1, "topic": "sums"}),
        sample(1, "15", metadata={"difficulty": 3}),
    )
    assert score("plain", easy, hard) == [2.0, 5.0]


def test_a_prompt_of_messages_gives_completions_of_messages(score):
    prompt = [{"role": "user", "content": "2 + 2?"}]
    assert score("chat", sample(0, "4", prompt=prompt, tokens=[7, 8, 9], response_length=2)) == [1.0]


def test_a_function_that_cannot_be_called_by_name_is_refused(score):
    with pytest.raises(ConfigError, match="takes completions by place"):
        score("unnamed", sample(0, "4"))
