"""Evaluation before the scripted engine, through `RolloutManager`."""

import json

import pytest
import yaml

from slime_core.errors import ConfigError, DataError
from slime_rollout.config import RolloutConfig
from slime_rollout.errors import GenerationError, RewardError
from slime_rollout.generate import sampling_seed
from slime_rollout.rollout import RolloutManager

ROWS = [{"prompt": f"say a number: {number}", "label": str(number)} for number in range(4)]
SUMS = [{"prompt": "a", "label": "1"}, {"prompt": "b", "label": "2"}]


@pytest.fixture
def manager(engine, tokenizer_dir, write_rows, tmp_path):
    def build(*, eval_config=None, on_progress=None, **changes):
        if eval_config is not None:
            (tmp_path / "sets.yaml").write_text(yaml.safe_dump({"eval": eval_config}))
            changes["eval_config"] = str(tmp_path / "sets.yaml")
        config = {
            "hf_checkpoint": tokenizer_dir,
            "prompt_data": write_rows(ROWS),
            "rollout_batch_size": 2,
            "rm_type": "first_integer",
            **changes,
        }
        return RolloutManager(RolloutConfig.of(**config), router_url=engine.url, run_seed=5, on_progress=on_progress)

    return build


@pytest.fixture
def sums(write_rows):
    return write_rows(SUMS, "sums.jsonl")


def requests_by_temperature(engine):
    found = {}
    for body in engine.bodies:
        found.setdefault(body["sampling_params"]["temperature"], []).append(body)
    return found


def test_two_sets(manager, engine, reply, sums, write_rows):
    progress = []
    given = manager(
        eval_prompt_data=("sums", sums, "other", write_rows([{"prompt": "c", "label": "1"}], "other.jsonl")),
        n_samples_per_eval_prompt=2,
        eval_temperature=0.0,
        eval_max_response_len=9,
        on_progress=lambda done, total: progress.append((done, total)),
    )
    before = given.state_dict()
    engine.answer = lambda number, body: reply(text="1")
    report = given.evaluate(7)
    assert report.rollout_id == 7
    assert report.scores == {"sums": 0.5, "other": 1.0}
    assert report.metrics["eval/sums-pass@1"] == report.metrics["eval/sums-pass@2"] == 0.5
    assert report.metrics["eval/other/response_len/mean"] == 2.0
    assert [sample.group_index for sample in report.samples["sums"]] == [0, 0, 1, 1]
    assert progress == [(done, 6) for done in range(1, 7)]
    assert given.state_dict() == before
    assert given.source.ledger.counts["generated"] == 0
    asked = [body["sampling_params"] for body in engine.bodies]
    assert {(one["temperature"], one["max_new_tokens"]) for one in asked} == {(0.0, 9)}
    seeds = sorted(one["sampling_seed"] for one in asked)
    streams = [("eval/sums", 4), ("eval/other", 2)]
    assert seeds == sorted(sampling_seed(5, index, 0, name) for name, count in streams for index in range(count))
    given.evaluate(8)
    assert sorted(body["sampling_params"]["sampling_seed"] for body in engine.bodies[6:]) == seeds


def test_without_held_out_sets_there_is_nothing_to_evaluate(manager, engine):
    report = manager().evaluate(0)
    assert (report.scores, report.metrics, report.samples, engine.bodies) == ({}, {}, {}, [])


def test_every_set_is_sampled_as_it_says(manager, engine, reply, sums):
    given = manager(
        rollout_temperature=0.8,
        rollout_stop=("x",),
        eval_top_k=30,
        eval_config={
            "defaults": {"n_samples_per_eval_prompt": 4, "max_response_len": 50},
            "datasets": {
                "greedy": {"path": sums, "temperature": 0, "n_samples_per_eval_prompt": 1, "min_new_tokens": 2},
                "drawn": {"path": sums, "temperature": 0.5, "stop": [], "stop_token_ids": [9], "max_context_len": 11},
                "usual": {"path": f"{sums}@[1:]"},
            },
        },
    )
    # Of the drawn ones of the first prompt a quarter is right.
    engine.answer = lambda number, body: reply(
        text="1" if len([b for b in engine.bodies if b["sampling_params"]["temperature"] == 0.5]) == 1 else "7"
    )
    report = given.evaluate(0)
    found = requests_by_temperature(engine)
    assert {temperature: len(bodies) for temperature, bodies in found.items()} == {0.0: 2, 0.5: 8, 0.8: 4}
    keys = ("top_k", "max_new_tokens", "min_new_tokens", "stop", "stop_token_ids")
    shown = {t: [bodies[0]["sampling_params"][key] for key in keys] for t, bodies in found.items()}
    room = 11 - len(found[0.5][0]["input_ids"])
    assert 0 < room < 50
    assert shown == {0.0: [30, 50, 2, ["x"], []], 0.5: [30, room, 0, [], [9]], 0.8: [30, 50, 0, ["x"], []]}
    assert {name: len(samples) for name, samples in report.samples.items()} == {"greedy": 2, "drawn": 8, "usual": 4}
    rates = {name: [key for key in report.metrics if key.startswith(f"eval/{name}-pass@")] for name in report.samples}
    assert rates == {
        "greedy": ["eval/greedy-pass@1"],
        "drawn": [f"eval/drawn-pass@{k}" for k in (1, 2, 4)],
        "usual": [f"eval/usual-pass@{k}" for k in (1, 2, 4)],
    }


def test_every_set_is_read_as_it_says(manager, engine, tokenizer_dir, write_rows):
    from transformers import AutoTokenizer

    rows = [{"question": "2 + 2?", "answer": 4, "source": "own"}, {"question": "long " * 40, "answer": 4}]
    own = write_rows(rows, "own.jsonl")
    given = manager(
        eval_config={
            "datasets": {
                "chat": {
                    "path": own,
                    "input_key": "question",
                    "label_key": "answer",
                    "max_prompt_len": 60,
                    "apply_chat_template": True,
                    "apply_chat_template_kwargs": {"add_generation_prompt": False},
                    "metadata_overrides": {"source": "held out", "level": [5]},
                    "n_samples_per_eval_prompt": 2,
                }
            }
        }
    )
    first, second = given.evaluate(0).samples["chat"]
    assert AutoTokenizer.from_pretrained(tokenizer_dir).decode(first.prompt_tokens) == "<|start|>user:2 + 2?<|end|>"
    assert (first.label, first.metadata) == ("4", {"source": "held out", "level": [5]})
    first.metadata["level"].append(6)
    assert second.metadata["level"] == [5]
    assert given.evaluate(1).samples["chat"][0].metadata["level"] == [5]


def test_every_set_has_the_reward_it_names(manager, engine, reply, sums, tmp_path):
    (tmp_path / "own.py").write_text(
        "def score(args, sample): return {'length': len(sample.response), 'zero': 0}\n"
        "def ranks(args, samples): return [place for place, _ in enumerate(samples)]\n"
    )
    engine.answer = lambda number, body: reply(text="The answer is 1.")
    given = manager(
        eval_config={
            "datasets": {
                "usual": {"path": sums},
                "ruled": {"path": sums, "rm_type": "exact"},
                "own": {"path": sums, "custom_rm_path": f"{tmp_path}/own.py:score", "reward_key": "length"},
                "group": {
                    "path": sums,
                    "custom_rm_path": f"{tmp_path}/own.py:ranks",
                    "group_rm": True,
                    "n_samples_per_eval_prompt": 3,
                },
            }
        }
    )
    assert given.evaluate(0).scores == {"usual": 0.5, "ruled": 0.0, "own": 16.0, "group": 1.0}
    assert [sample.reward for sample in given.generate(0).samples] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("in_file", "advice"), [(False, "choose one with --eval-reward-key"), (True, "choose one with reward_key")]
)
def test_an_error_names_the_flag_of_evaluations_or_the_files_key(manager, sums, tmp_path, in_file, advice):
    (tmp_path / "own.py").write_text("def score(args, sample): return {'length': 1.0}\n")
    held_out = {"custom_rm_path": f"{tmp_path}/own.py:score", "reward_key": "size"}
    if in_file:
        given = manager(eval_config={"datasets": {"own": {"path": sums, **held_out}}})
    else:
        flags = {**held_out, "reward_key": "length", "rm_type": None}
        given = manager(eval_prompt_data=("own", sums), eval_reward_key="size", **flags)
    with pytest.raises(DataError, match=f"held-out set own: .*: {advice}$"):
        given.evaluate(0)


def test_sets_that_are_scored_alike_share_what_scores(manager, engine, sums, tmp_path):
    (tmp_path / "own.py").write_text(
        "made = []\n"
        "class CustomRewardModel:\n"
        "    def __init__(self, size): made.append(size)\n"
        "    def compute_reward(self, prompts, responses): return [float(len(made))] * len(prompts)\n"
    )
    own = {"path": sums, "custom_rm_path": f"{tmp_path}/own.py"}
    given = manager(
        rm_type=None,
        custom_rm_path=f"{tmp_path}/own.py",
        custom_rm_kwargs='{"size": 1}',
        eval_config={
            "datasets": {"a": {"path": sums}, "b": {**own, "custom_rm_kwargs": {"size": 1}}},
        },
    )
    assert given.evaluate(0).scores == {"a": 1.0, "b": 1.0}
    assert [sample.reward for sample in given.generate(0).samples] == [1.0, 1.0]
    given = manager(eval_config={"datasets": {"c": {**own, "custom_rm_kwargs": {"size": 2}}}})
    assert given.evaluate(0).scores == {"c": 2.0}


def test_what_fails_is_told_with_the_name_of_its_set(manager, engine, reply, sums, tmp_path):
    (tmp_path / "own.py").write_text(
        "def fails(args, sample): raise ValueError('no')\ndef named(args, sample): return {'a': 1}\n"
    )

    def one_of_two(**own):
        return manager(eval_config={"datasets": {"good": {"path": sums}, "aime": {"path": sums, **own}}})

    with pytest.raises(RewardError, match=r"^held-out set aime: .*raised ValueError for sample \d: no"):
        failing = one_of_two(custom_rm_path=f"{tmp_path}/own.py:fails")
        for number in range(64):
            assert failing.evaluate(number).scores["aime"] == 0.0
    with pytest.raises(DataError, match=r"^held-out set aime: .*the reward has the entries \['a'\]"):
        one_of_two(custom_rm_path=f"{tmp_path}/own.py:named").evaluate(0)
    engine.answer = lambda number, body: 400 if body["sampling_params"]["temperature"] == 0.25 else reply()
    with pytest.raises(GenerationError, match=r"^held-out set aime: .*refused a request"):
        one_of_two(temperature=0.25).evaluate(0)
    with pytest.raises(ConfigError, match=r"^held-out set aime: custom_rm_path .*has no function none"):
        one_of_two(custom_rm_path=f"{tmp_path}/own.py:none")
    with pytest.raises(DataError, match=r"^held-out set aime: .*sums\.jsonl:1: no field 'answer'"):
        one_of_two(label_key="answer")
    for rule, problem in (("maht", "is 'maht'; allowed: exact, "), ("remote_rm", "no service is known")):
        with pytest.raises(DataError, match=rf"^held-out set aime: metadata_overrides, prompt 1 of .*{problem}"):
            one_of_two(metadata_overrides={"rm_type": rule})


def test_a_failed_evaluation_leaves_the_run_as_it_was(manager, engine, reply, sums):
    given = manager(eval_prompt_data=("sums", sums))
    given.generate(0)
    before = json.dumps(given.state_dict())
    engine.answer = lambda number, body: 400
    with pytest.raises(GenerationError):
        given.evaluate(1)
    assert json.dumps(given.state_dict()) == before
    engine.answer = lambda number, body: reply()
    assert [sample.index for sample in given.generate(1).samples] == [2, 3]


def test_a_set_with_a_generate_function_of_its_own(manager, sums, engine, tmp_path):
    (tmp_path / "own.py").write_text(
        "async def own(args, sample, sampling_params, evaluation=False):\n"
        "    assert evaluation\n"
        "    sample.response = '1'\n"
        "    return sample\n"
    )
    sets = {"own": {"path": sums, "custom_generate_function_path": f"{tmp_path}/own.py:own"}, "plain": {"path": sums}}
    report = manager(eval_config={"datasets": sets}).evaluate(0)
    assert [sample.response for sample in report.samples["own"]] == ["1", "1"]
    assert report.scores["own"] == 0.5
    assert len(engine.bodies) == 2
    sets["own"]["custom_generate_function_path"] = f"{tmp_path}/own.py:other"
    with pytest.raises(ConfigError, match=r"set own: .* has no function other"):
        manager(eval_config={"datasets": sets})
