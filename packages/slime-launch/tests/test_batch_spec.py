"""The flags of a run decide how its batches are split and what of them is kept."""

import pytest

from slime_convert.shape import ModelShape
from slime_core.errors import ConfigError, DataError
from slime_core.types import RolloutBatch, Sample
from slime_launch.batch_spec import batch_spec
from slime_launch.flags import parse_train
from slime_rollout.prepare import prepare_rollout, split_held_out, split_rollout

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
    return split_rollout(batch, batch_spec(parse_train(to_words(flags | names)), SHAPE, ranks))


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
        spec = batch_spec(parse_train(to_words(flags | more)), SHAPE, 1)
        metrics = prepare_rollout(batch, spec, state_dict=dict, put=lambda shard: shard).metrics
        found.append({name: value for name, value in metrics.items() if name.startswith("passrate/")})
    assert found[0] == {}
    assert found[1] == {"passrate/pass@1": 0.5, "passrate/pass@2": 1.0}


def test_as_many_samples_are_kept_for_a_report_as_are_asked_for(flags, to_words, tmp_path):
    for more, kept in (({}, 8), ({"--report-samples": "3"}, 3)):
        spec = batch_spec(parse_train(to_words(flags | {"--output-dir": str(tmp_path)} | more)), SHAPE, 1)
        assert (spec.shown, spec.shown_in) == (kept, str(tmp_path))


def test_rewards_of_a_function_replace_the_estimators(batch, flags, to_words, tmp_path):
    (tmp_path / "post.py").write_text(
        "def rewards(args, samples):\n"
        "    return [one.reward for one in samples], [one.index * args.scale for one in samples]\n"
    )
    (tmp_path / "own.yaml").write_text("scale: 0.5")
    own = {"--custom-reward-post-process-path": f"{tmp_path}/post.py:rewards"}
    words = to_words(flags | own | {"--custom-config-path": f"{tmp_path}/own.yaml"})
    spec = batch_spec(parse_train(words), SHAPE, 1)
    ready = prepare_rollout(batch, spec, state_dict=dict, put=lambda shard: shard)
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


def test_a_held_out_set_needs_a_row_for_each_rank_and_no_more(batch, flags, to_words):
    words = to_words(flags | {"--loss-type": "sft_loss", "--n-samples-per-prompt": "1", "--global-batch-size": "4"})
    settings = parse_train([word for word in words if word != "--colocate"])

    def shards(ranks):
        rows = RolloutBatch(rollout_id=0, groups=[[sample] for sample in batch.samples[:4]])
        return split_held_out(rows, batch_spec(settings, SHAPE, ranks))

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
        spec = batch_spec(parse_train(words), SHAPE, 1)
        shown.append(prepare_rollout(batch, spec, state_dict=dict, put=lambda shard: shard).examples)
    assert shown[0] == [{"prompt": f"question {index}", "response": "long " * 100, "reward": 0} for index in (0, 2, 4)]
    assert [example["reward"] for example in shown[1]] == [None] * 3


def test_a_run_that_only_evaluates_needs_no_whole_steps(flags, to_words):
    words = [*to_words(flags | {"--num-steps-per-rollout": "3"}), "--eval-prompt-data", "held", "held.jsonl"]
    with pytest.raises(ConfigError, match="num_steps_per_rollout"):
        batch_spec(parse_train(words), SHAPE, 1)
    assert batch_spec(parse_train([*words, "--num-rollout", "0"]), SHAPE, 1).shards.global_batch_size
