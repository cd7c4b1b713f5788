import contextlib

import pytest

from slime_convert.shape import ModelShape
from slime_core.errors import DataError
from slime_core.types import RolloutBatch, Sample
from slime_launch.errors import RunError
from slime_launch.flags import parse_train
from slime_launch.shards import (
    Recipe,
    check_scored,
    check_versions,
    examples,
    prepare_rollout,
    split_held_out,
    split_rollout,
)

SHAPE = ModelShape(
    family="qwen3", num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_query_groups=2,
    kv_channels=32, vocab_size=50, max_position_embeddings=4096,
)  # fmt: skip


@pytest.fixture
def batch():
    """One response of 1,000 tokens, seven of 200: as many tokens as five of them, and as many operations as eight."""
    lengths = [1000, *[200] * 7]
    samples = [
        Sample(
            index=index, group_index=index // 2, prompt="p", tokens=[1] * (length + 4), response_length=length,
            reward=index % 2,
        )
        for index, length in enumerate(lengths)
    ]  # fmt: skip
    return RolloutBatch(rollout_id=0, groups=[samples[start : start + 2] for start in range(0, 8, 2)])


def split(batch, flags, to_words, ranks=2, **more):
    names = {"--" + name.replace("_", "-"): None if value is True else str(value) for name, value in more.items()}
    settings = parse_train(to_words(flags | names))
    return split_rollout(
        batch, Recipe(settings=settings, shape=SHAPE, data_parallel_size=ranks, store=None, can_resume=False)
    )


def counts(shards):
    return [[len(positions) for positions in shard.steps[0].micro_batches] for shard in shards]


def test_micro_batches_by_samples(batch, flags, to_words):
    assert counts(split(batch, flags, to_words, micro_batch_size=2)) == [[2, 2], [2, 2]]


def test_micro_batches_under_a_token_limit(batch, flags, to_words):
    shards = split(batch, flags, to_words, use_dynamic_batch_size=True, max_tokens_per_gpu=450)
    tokens = [
        sum(len(shard.samples[position].tokens) for position in positions)
        for shard in shards
        for positions in shard.steps[0].micro_batches
    ]
    assert max(tokens) == 1004  # the long one, alone
    assert sorted(tokens)[-2] <= 450
    assert len({len(shard.steps[0].micro_batches) for shard in shards}) == 1


def test_context_parallel_ranks_share_a_limit_of_tokens(batch, flags, to_words):
    limit = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 450, "context_parallel_size": 2}
    for cut, most in (({}, 2), ({"context_parallel_size": 1}, 1)):
        [shard] = split(batch, flags, to_words, ranks=1, **limit | cut, actor_num_gpus_per_node=2)
        assert max(len(positions) for positions in shard.steps[0].micro_batches) == 2 * most


def test_what_trains_nothing_is_left_out(batch, flags, to_words):
    for sample in batch.groups[1]:
        sample.reward = 1.0
    trained = [sample.index for shard in split(batch, flags, to_words) for sample in shard.samples]
    assert sorted(trained) == [0, 1, 4, 5, 6, 7]


def test_balance_by_operations(batch, flags, to_words):
    by_tokens, by_flops = (
        split(batch, flags, to_words, use_dynamic_batch_size=True, max_tokens_per_gpu=5000, share_prompts="off", **more)
        for more in ({}, {"balance_by_flops": True})
    )
    loads = [sorted(len(shard.samples) for shard in shards) for shards in (by_tokens, by_flops)]
    assert loads[0] == [2, 6]
    assert loads[1] == [1, 7]


def test_pass_rates_on_request(batch, flags, to_words):
    """Of the rewards 0 and 1 in turn: every second sample passes, and one of each pair."""
    found = []
    for more in ({}, {"--log-passrate": None}):
        recipe = Recipe(
            settings=parse_train(to_words(flags | more)),
            shape=SHAPE,
            data_parallel_size=1,
            store=None,
            can_resume=False,
        )
        metrics = prepare_rollout(batch, recipe, state_dict=dict, put=lambda shard: shard).metrics
        found.append({name: value for name, value in metrics.items() if name.startswith("passrate/")})
    assert found[0] == {}
    assert found[1] == {"passrate/pass@1": 0.5, "passrate/pass@2": 1.0}


def test_rewards_of_a_function_replace_the_estimators(batch, flags, to_words, tmp_path):
    (tmp_path / "post.py").write_text(
        "def rewards(args, samples):\n"
        "    return [one.reward for one in samples], [one.index * args.scale for one in samples]\n"
    )
    (tmp_path / "own.yaml").write_text("scale: 0.5")
    own = {"--custom-reward-post-process-path": f"{tmp_path}/post.py:rewards"}
    words = to_words(flags | own | {"--custom-config-path": f"{tmp_path}/own.yaml"})
    recipe = Recipe(settings=parse_train(words), shape=SHAPE, data_parallel_size=1, store=None, can_resume=False)
    ready = prepare_rollout(batch, recipe, state_dict=dict, put=lambda shard: shard)
    trained = {sample.index: sample for shard in ready.shards for sample in shard.samples}
    assert {index: (sample.reward, sample.raw_reward) for index, sample in trained.items()} == {
        index: (0.5 * index, index % 2) for index in range(1, 8)
    }  # sample 0, whose reward is 0, adds nothing
    assert not any(name.startswith("post_processed") for name in trained[1].extras)


def test_a_function_changes_what_is_trained_on(batch, flags, to_words, tmp_path):
    (tmp_path / "last.py").write_text(
        "def change(args, rollout_id, rollout_data):\n"
        "    assert rollout_data['response_lengths'][0] == 1000 and rollout_data['rewards'][1] > 0\n"
        "    rollout_data['rewards'] = [0.5 + index for index in rollout_data['sample_indices']]\n"
        "    for mask in rollout_data['loss_masks']:\n"
        "        mask[100:] = 0\n"
        "    rollout_data['own'] = [rollout_id + args.scale] * len(rollout_data['tokens'])\n"
    )
    (tmp_path / "own.yaml").write_text("scale: 0.5")
    own = {"rollout_data_postprocess_path": f"{tmp_path}/last.py:change", "custom_config_path": f"{tmp_path}/own.yaml"}
    shards = split(batch, flags, to_words, **own)
    trained = {sample.index: sample for shard in shards for sample in shard.samples}
    assert {index: sample.reward for index, sample in trained.items()} == {index: 0.5 + index for index in range(8)}
    assert {(int(one.loss_mask.sum()), one.trajectory_tokens, one.extras["own"]) for one in trained.values()} == {
        (100, 100, 0.5)
    }
    assert {step.global_tokens for shard in shards for step in shard.steps} == {800}
    assert all(sample.loss_mask is None for group in batch.groups for sample in group)  # these were not touched


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("rollout_data['tokens'][0] = [7, 8]", r"left tokens of sample 0 as \[7, 8\]; which cannot be changed here"),
        ("rollout_data['rewards'][3] = float('nan')", "left rewards of sample 3 as nan; write a finite number"),
        ("rollout_data['loss_masks'][1][0] = 2", r"left loss_masks of sample 1 as \[2 1 1 .*write 1 where"),
        ("rollout_data['rewards'].pop()", "it must be a list of 8, one for each sample"),
        ("del rollout_data['raw_reward']", "took away raw_reward"),
        ("rollout_data['own'] = ['text'] * 8", "left own of sample 0 as text; write an array or a number"),
        ("return rollout_data", "returned a dict, which nothing would use"),
    ],
)
def test_what_such_a_function_may_not_do(batch, flags, to_words, tmp_path, body, message):
    (tmp_path / "last.py").write_text(f"def change(args, rollout_id, rollout_data):\n    {body}\n")
    with pytest.raises(DataError, match=message):
        split(batch, flags, to_words, rollout_data_postprocess_path=f"{tmp_path}/last.py:change")


@pytest.mark.parametrize(
    ("versions", "most_behind", "allowed"),
    [
        ([3, 3], 0, None),
        ([3, -1], 0, None),
        ([], 0, None),
        ([3, 2], 0, "3: "),
        ([4, 4], 0, "3: "),
        ([3, 2], 1, None),
        ([3, 1], 1, "2 to 3: "),
        ([3, 4], 1, "2 to 3: "),
        ([0, -1], None, None),
        ([3, 4], None, "3 or less: "),
    ],
)
def test_no_token_is_of_another_policy_than_it_may_be(versions, most_behind, allowed):
    sample = Sample(
        index=9, group_index=0, prompt="p", tokens=[1, 2, 3], response_length=2, reward=1.0, weight_versions=versions
    )
    batch = RolloutBatch(rollout_id=7, weight_version=3, groups=[[sample]])
    refused = pytest.raises(RunError, match=f"sample 9 of step 8 .* must be {allowed}")
    with contextlib.nullcontext() if allowed is None else refused:
        check_versions(batch.columns(), most_behind=most_behind)


@pytest.mark.parametrize(
    ("rollout_id", "reasons", "fine"),
    [(0, ["TypeError: x"] * 4, False), (0, ["TypeError: x"] * 3, True), (0, [], True), (1, ["TypeError: x"] * 4, True)],
)
def test_a_run_whose_first_rollout_has_no_reward_ends(rollout_id, reasons, fine):
    samples = [Sample(index=i, group_index=0, prompt="p", tokens=[1, 2], response_length=1) for i in range(4)]
    for sample, reason in zip(samples, reasons, strict=False):
        sample.metadata["reward_failure"] = reason
    expected = r"none of the 4 samples of the first rollout could be scored: TypeError: x; correct the reward"
    with contextlib.nullcontext() if fine else pytest.raises(RunError, match=expected):
        check_scored(RolloutBatch(rollout_id=rollout_id, groups=[samples]).columns())


def test_a_held_out_set_needs_a_row_for_each_rank_and_no_more(batch, flags, to_words):
    words = to_words(flags | {"--loss-type": "sft_loss", "--n-samples-per-prompt": "1"})
    settings = parse_train([word for word in words if word != "--colocate"])

    def shards(ranks):
        recipe = Recipe(settings=settings, shape=SHAPE, data_parallel_size=ranks, store=None, can_resume=False)
        return split_held_out(RolloutBatch(rollout_id=0, groups=[[sample] for sample in batch.samples[:4]]), recipe)

    assert [sorted(sample.index for sample in shard.samples) for shard in shards(1)] == [[0, 1, 2, 3]]
    assert [len(shard.samples) for shard in shards(4)] == [1] * 4
    with pytest.raises(DataError, match="a held-out set has 4 rows for 5 data-parallel ranks"):
        shards(5)


def test_three_samples_are_for_people_to_read(batch, flags, to_words):
    """The first of each of the first groups, whole; rows of a data set have no reward."""
    for sample in batch.samples:
        sample.prompt, sample.response = f"question {sample.index}", "long " * 100
    shown = []
    for more in ({}, {"--loss-type": "sft_loss", "--n-samples-per-prompt": "1", "--rollout-batch-size": "8"}):
        words = [word for word in to_words(flags | more) if word != "--colocate" or not more]
        recipe = Recipe(settings=parse_train(words), shape=SHAPE, data_parallel_size=1, store=None, can_resume=False)
        shown.append(prepare_rollout(batch, recipe, state_dict=dict, put=lambda shard: shard).examples)
    assert shown[0] == [{"prompt": f"question {index}", "response": "long " * 100, "reward": 0} for index in (0, 2, 4)]
    assert [example["reward"] for example in shown[1]] == [None] * 3


def test_a_row_of_several_turns_shows_what_was_asked_before_its_first_trained_answer():
    turns = [("user", "one?"), ("assistant", "first"), ("user", "two?"), ("assistant", "second")]
    messages = [{"role": role, "content": text} for role, text in turns]
    responses = {"one?": "first<|end|>\nuser\ntwo?\nassistant\nsecond<|end|>", "two?": "second<|end|>"}
    for asked, response in responses.items():
        sample = Sample(index=0, group_index=0, prompt=messages, tokens=[1], response=response)
        assert [one["prompt"] for one in examples([sample], of_data=True)] == [asked]


def test_examples_of_conversations_show_the_question():
    question, answer = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
    prompts = ([question], [question, answer], [question, answer, question, answer], "2 + 2?", [answer])
    samples = [Sample(index=at, group_index=at, prompt=prompt, tokens=[1]) for at, prompt in enumerate(prompts)]
    shown = [examples(samples[at : at + 1])[0]["prompt"] for at in range(len(samples))]
    assert shown == ["2 + 2?"] * 4 + ["4"]
