"""Custom generate functions in whole rollouts, before the scripted engine."""

import asyncio
import copy
import json

import pytest

from slime_core.errors import ConfigError
from slime_core.types import Status
from slime_rollout.config import RolloutConfig
from slime_rollout.errors import GenerationError
from slime_rollout.generate import sampling_seed
from slime_rollout.rollout import RolloutManager

ROWS = [{"prompt": [{"role": "user", "content": f"say a number: {number}"}], "label": "1"} for number in range(6)]


@pytest.fixture
def manager(engine, tokenizer_dir, write_rows, tmp_path):
    path = write_rows(ROWS)

    def build(source, **changes):
        (tmp_path / "custom_generate.py").write_text(source, encoding="utf-8")
        config = {
            "hf_checkpoint": tokenizer_dir,
            "prompt_data": path,
            "apply_chat_template": True,
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "rm_type": "first_integer",
            "custom_generate_function_path": f"{tmp_path}/custom_generate.py",
            **changes,
        }
        return RolloutManager(RolloutConfig.of(**config), router_url=engine.url, run_seed=5)

    return build


SEED = """
from slime_rollout import generate_single

async def custom_generate(args, samples, evaluation=False):
    for sample in samples:
        conversation = sample.prompt
        for turn in range(args.max_turns):
            response = await generate_single(conversation)
            conversation.append({"role": "assistant", "content": response})
            conversation.append({"role": "tool", "content": "go on"})
        sample.response = response
        sample.reward = 0.25 + evaluation
    return samples
"""


def test_a_rollout_of_several_turns(manager, engine):
    given = manager(SEED, max_turns=3, eval_prompt_data=(manager(SEED)._config.data.prompt_data,))
    batch = given.generate(0)
    assert len(engine.bodies) == 2 * 2 * 3
    assert [sample.reward for sample in batch.samples] == [0.25] * 4  # the rule was not asked
    assert all(sample.metadata["turns"] == 3 and 0 in sample.loss_mask for sample in batch.samples)
    assert len(batch.samples[0].prompt) == 1
    sampled = sum(version >= 0 for sample in batch.samples for version in sample.weight_versions)
    assert batch.metrics["response_tokens"] == sampled == 2 * 2 * 3 * 2
    assert batch.metrics["weight_version/min"] == 0  # what was observed has no version
    assert given.evaluate(1).scores == {"eval": 1.25}
    assert batch.columns().batch() == batch


PARTS = """
import copy
async def custom_generate(args, sample, sampling_params, evaluation=False):
    sample.response = "1"
    return [sample, copy.deepcopy(sample)]
"""


def test_parts_have_numbers_of_their_own_in_a_resumed_run_too(manager):
    given = manager(PARTS, eval_prompt_data=(manager(PARTS)._config.data.prompt_data,))
    batch = given.generate(0)
    assert [(sample.index, sample.trajectory) for sample in batch.samples] == [
        *((0, 0), (4, 0), (1, 1), (5, 1), (2, 2), (6, 2), (3, 3), (7, 3))
    ]
    assert batch.metrics["raw_reward"] == 1.0
    assert given.source.ledger.counts["trained"] == 4 and given.source.check_ledger() is None
    again = manager(PARTS)
    again.load_state_dict(json.loads(json.dumps(given.state_dict())))
    indices = [[sample.index for sample in one.generate(1).samples] for one in (given, again)]
    assert indices == [[8, 12, 9, 13, 10, 14, 11, 15]] * 2
    before = given.state_dict()
    scored = given.evaluate(1).samples["eval"]
    assert len({sample.index for sample in scored}) == len(scored) == 12
    assert given.state_dict() == before


def test_what_is_left_over_of_several_parts_is_trained_on_later(manager):
    """Over-sampling: finished parts wait in the buffer, and each is trained on once, with a number of its own."""
    buffered = {"data_source_path": "slime_rollout.data.RolloutDataSourceWithBuffer", "over_sampling_batch_size": 4}
    given = manager(PARTS, **buffered)
    seen = [sample for number in range(3) for sample in given.generate(number).samples]
    assert len(seen) == 3 * 8 and len({sample.index for sample in seen}) == len(seen)
    assert {len([one for one in seen if one.trajectory == sample.trajectory]) for sample in seen} == {2}
    assert given.source.check_ledger() is None
    assert given.source.ledger.counts["trained"] == 12


SLOW = """
import copy
async def custom_generate(args, sample, sampling_params):
    from slime_rollout import Trajectory
    await Trajectory.start(sample).generate()
    return [sample, copy.deepcopy(sample)]
"""


def test_parts_that_wait_beside_an_unfinished_sample_stay_the_same(manager, engine, reply):
    """A group of which one sample is never done goes back again and again, with the parts that it has."""
    held = {sampling_seed(5, 1)}

    async def answer(number, body):
        if body["sampling_params"]["sampling_seed"] in held:
            await asyncio.sleep(600)
        return reply(text="1")

    engine.answer = answer
    given = manager(SLOW, over_sampling_batch_size=3)
    for number in range(3):
        assert 0 not in {group[0].group_index for group in given.generate(number).groups}
        (group,) = [group for group in given.source._buffer if group[0].group_index == 0]
        assert [sample.trajectory for sample in group] == [0, 0, 1]
        assert len({sample.index for sample in group}) == 3
    held.clear()
    group = given.generate(3).groups[0]
    assert [sample.trajectory for sample in group] == [0, 0, 1, 1]
    assert given.source.check_ledger() is None


def test_parts_that_became_old_are_one_trajectory_again(manager, engine, reply):
    version = {"now": "0"}
    engine.answer = lambda number, body: reply(text="1", version=version["now"])
    given = manager(SLOW, over_sampling_batch_size=4, max_weight_staleness=0)
    (group,) = given.source.get_samples(1)
    parts = []
    for sample in group:
        sample.append_response([9], text="1", log_probs=[-0.5], weight_version=0)
        sample.status, sample.reward, sample.trajectory_id = "completed", 1.0, sample.index
        sample.validate()
        other = copy.deepcopy(sample)
        other.index = given.source.fresh_index()
        parts += [sample, other]
    given.source.add_samples([parts])
    version["now"] = "1"
    trained = [group for number in (1, 1) for group in given.generate(number).groups]
    (ours,) = [group for group in trained if group[0].group_index == 0]
    assert [(sample.trajectory, sample.weight_versions) for sample in ours] == [(0, [1, 1])] * 2 + [(1, [1, 1])] * 2
    assert given.source.check_ledger() is None


def test_parts_that_nobody_keeps_are_counted_once(manager, tmp_path, caplog):
    """A source without a buffer drops what is given back."""
    given = manager(SLOW, over_sampling_batch_size=4, data_source_path="slime_rollout.data.RolloutDataSource")
    given.generate(0)
    assert "ledger" not in caplog.text
    assert given.source.ledger.counts["aborted"] == 4


def test_an_evaluated_trajectory_counts_once(manager, write_rows):
    """The first sample of each prompt becomes three parts, which share its reward."""
    source = """
import copy
async def custom_generate(args, sample, sampling_params, evaluation=False):
    sample.response = "1" if sample.index % 2 == 0 else "0"
    return [copy.deepcopy(sample) for _ in range(1 if sample.index % 2 else 3)]
"""
    held_out = write_rows([{"prompt": ROWS[0]["prompt"], "label": "1"}] * 2, "held_out.jsonl")
    report = manager(source, eval_prompt_data=("sums", held_out), n_samples_per_eval_prompt=2).evaluate(0)
    assert len(report.samples["sums"]) == 2 * (3 + 1)
    assert report.scores == {"sums": 0.5}
    assert (report.metrics["eval/sums-pass@1"], report.metrics["eval/sums-pass@2"]) == (0.5, 1.0)
    assert "eval/sums-pass@4" not in report.metrics


def test_a_rollout_whose_function_fails_takes_no_prompts(manager):
    given = manager("async def custom_generate(args, samples): raise ValueError(samples[0].index)\n")
    before = given.state_dict()
    with pytest.raises(GenerationError, match="raised ValueError for 2 samples: 0"):
        given.generate(0)
    assert given.state_dict() == before


OTHER_LOOP = """
from slime_rollout import GenerateState, get_model_url, post

async def custom_generate(args, sample, sampling_params):
    tokenizer = GenerateState(args).tokenizer
    assert get_model_url(args) == f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt = tokenizer.apply_chat_template(sample.prompt, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    payload = {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True}
    output = await post(get_model_url(args), payload)
    pairs = output["meta_info"]["output_token_logprobs"]
    sample.tokens = ids + [pair[1] for pair in pairs]
    sample.response_length = len(pairs)
    sample.response = output["text"]
    sample.rollout_log_probs = [pair[0] for pair in pairs]
    sample.loss_mask = [1] * len(pairs)
    sample.status = "completed"
    return sample
"""


def test_a_function_that_speaks_to_the_router_itself(manager, engine, reply):
    engine.answer = lambda number, body: reply(text="1", tokens=(7, 8))
    batch = manager(OTHER_LOOP).generate(0)
    assert [sample.response_tokens for sample in batch.samples] == [[7, 8]] * 4
    assert batch.metrics["raw_reward"] == 1.0


UPSTREAM = """
from slime_core.types import Sample
from slime_rollout import GenerateState, get_model_url, post

async def generate(args, sample: Sample, sampling_params) -> Sample:
    tokenizer = GenerateState(args).tokenizer
    for observation in ("<42>", None):
        payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(get_model_url(args), payload)
        log_probs, tokens, _ = zip(*output["meta_info"]["output_token_logprobs"])
        sample.append_response(tokens, log_probs=log_probs, text=output["text"])
        if output["meta_info"]["finish_reason"]["type"] == "length":
            sample.status = Sample.Status.TRUNCATED
            return sample
        if observation is not None:
            seen = tokenizer(observation, add_special_tokens=False)["input_ids"]
            sample.append_response(seen, text=observation, trained=False)
    sample.status = Sample.Status.COMPLETED
    return sample
"""


def test_a_function_written_for_upstream_needs_what_the_page_says(manager, engine, reply):
    engine.answer = lambda number, body: reply(text="1", tokens=(7, 8))
    for sample in manager(UPSTREAM).generate(0).samples:
        assert (sample.status, sample.response) == (Status.COMPLETED, "1<42>1")
        seen = sample.response_length - 4
        assert seen > 0 and sample.loss_mask == [1, 1, *[0] * seen, 1, 1]
        assert [value < 0 for value in sample.rollout_log_probs] == [mask == 1 for mask in sample.loss_mask]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (400, "POST http.*/generate was refused: HTTP 400: scripted 400"),
        (None, "POST http.*/generate failed: ServerDisconnected"),
        ("no json", "POST http.*/generate answered with no JSON: no json"),
    ],
)
def test_a_post_that_fails(manager, engine, answer, message):
    engine.answer = lambda number, body: answer
    with pytest.raises(GenerationError, match=message):
        manager(OTHER_LOOP).generate(0)


def test_a_function_that_cannot_be_used_is_told_when_the_manager_is_made(manager, engine):
    with pytest.raises(ConfigError, match="is not async"):
        manager("def custom_generate(args, sample, sampling_params): pass\n")
    assert not engine.bodies
