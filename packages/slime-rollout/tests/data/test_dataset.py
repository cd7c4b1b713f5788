import logging
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_rollout.config import RolloutConfig
from slime_rollout.data import PromptDataset, PromptEncoder, load_tokenizer
from slime_rollout.data.dataset import epoch_order, epoch_shares


@pytest.fixture
def load(tokenizer_dir):
    encoder = PromptEncoder(load_tokenizer(tokenizer_dir), apply_chat_template=False)

    def build(path, **changes):
        config = RolloutConfig.of(
            **{"hf_checkpoint": tokenizer_dir, "prompt_data": path, "rollout_batch_size": 1, **changes}
        )
        return PromptDataset.load(path, config, encoder)

    return build


def token_counts(dataset):
    groups = (dataset.group(place, group_index=0, first_index=0, size=1) for place in range(len(dataset)))
    return [len(sample.tokens) for (sample,) in groups]


def test_long_prompts_are_left_out_and_counted(load, write_rows, caplog):
    path = write_rows([{"prompt": "12 + 30 = " * times, "label": "42"} for times in (1, 9, 2)])
    lengths = token_counts(load(path))
    with caplog.at_level(logging.WARNING):
        kept = load(path, rollout_max_prompt_len=lengths[2])
    assert token_counts(kept) == [lengths[0], lengths[2]]
    assert f"left out 1 of 3 prompts, longer than {lengths[2]} tokens" in caplog.text


def test_no_prompt_short_enough(load, write_rows):
    path = write_rows([{"prompt": "12 + 30 = ", "label": "42"}])
    with pytest.raises(DataError, match=r"all 1 prompts .* --rollout-max-prompt-len 1; the shortest has 5 tokens"):
        load(path, rollout_max_prompt_len=1)


def test_samples_of_a_group_share_nothing(load, write_rows):
    path = write_rows([{"prompt": "a", "label": "1", "metadata": {"tags": ["x"]}}])
    dataset = load(path)
    first, second = dataset.group(0, group_index=7, first_index=14, size=2)
    assert (first.index, second.index, first.group_index, second.group_index) == (14, 15, 7, 7)
    assert first.label == "1"
    assert first.response_length == 0
    first.tokens.append(9)
    first.metadata["tags"].append("y")
    assert second.tokens == dataset.group(0, group_index=0, first_index=0, size=1)[0].tokens
    assert second.metadata == {"tags": ["x"]}


def test_the_digest_tells_data_sets_apart(load, write_rows):
    rows = [{"prompt": "a", "label": "1"}, {"prompt": "b", "label": "2"}]
    digest = load(write_rows(rows)).digest
    assert load(write_rows(rows, "copy.jsonl")).digest == digest
    assert load(write_rows(rows[::-1])).digest != digest
    assert load(write_rows([rows[0], {"prompt": "b", "label": "3"}])).digest != digest


def test_data_sets_are_joined_in_their_order(load, write_rows):
    one, two = (load(write_rows([{"prompt": text, "label": "1"} for text in texts])) for texts in ("ab", "c"))
    joined = PromptDataset.join([one, two])
    prompts = [joined.group(place, group_index=0, first_index=0, size=1)[0].prompt for place in range(len(joined))]
    assert prompts == ["a", "b", "c"]
    assert joined.epoch_order(0, shuffle=False, seed=0) == [0, 1, 2]
    weighted = PromptDataset.join([one, two], [1.0, 2.0])
    assert weighted.epoch_order(0, shuffle=False, seed=0) == [2, 0, 2]
    digests = {joined.digest, weighted.digest, PromptDataset.join([one, two], [2.0, 1.0]).digest}
    assert len(digests) == 3
    assert PromptDataset.join([one]).digest == one.digest


def test_tools_are_in_the_samples_metadata(load, write_rows):
    tools = [{"type": "function", "function": {"name": "add"}}]
    (sample,) = load(write_rows([{"prompt": "a", "label": "1", "api": tools}]), tool_key="api").group(
        0, group_index=0, first_index=0, size=1
    )
    assert sample.metadata == {"tools": tools}


def order(sizes, weights, epoch=0, shuffle=True, seed=42):
    return epoch_order(sizes, weights, epoch=epoch, shuffle=shuffle, seed=seed)


def test_without_weights_every_prompt_comes_once():
    assert order([2, 3], None, shuffle=False) == [0, 1, 2, 3, 4]
    assert sorted(order([2, 3], None)) == [0, 1, 2, 3, 4]
    assert order([5], None) == order([2, 3], None)


def test_shares_without_shuffle_are_spread_evenly():
    assert order([4, 2], [1, 2], shuffle=False) == [4, 0, 5, 4, 1, 5]
    assert order([4, 2], [1, 2], epoch=1, shuffle=False) == [4, 2, 5, 4, 3, 5]


@pytest.mark.parametrize("weights", [[3, 1], [0.75, 0.25], [3e300, 1e300]])
def test_only_ratios_count(weights):
    assert epoch_shares([60, 40], weights) == [75, 25]


def test_a_small_weight_still_gives_a_prompt():
    assert epoch_shares([1000, 5], [1, 1e-9]) == [1005, 1]


@settings(deadline=None, max_examples=60)
@given(
    parts=st.lists(st.tuples(st.integers(1, 9), st.floats(0.05, 20)), min_size=1, max_size=4),
    epochs=st.integers(1, 6),
    shuffle=st.booleans(),
)
def test_each_set_gives_its_share_and_all_its_prompts_in_turn(parts, epochs, shuffle):
    sizes, weights = zip(*parts, strict=True)
    shares = epoch_shares(sizes, weights)
    start, counts = 0, Counter()
    orders = [order(sizes, weights, epoch, shuffle) for epoch in range(epochs)]
    for places in orders:
        counts.update(places)
    for size, share in zip(sizes, shares, strict=True):
        own = range(start, start + size)
        assert all(sum(place in own for place in places) == share for places in orders)
        seen = [counts[place] for place in own]
        assert max(seen) - min(seen) <= 1
        assert sum(seen) == share * epochs
        start += size


def test_epochs_and_seeds_differ():
    orders = {tuple(order([30, 30], [1, 1], epoch, seed=seed)) for epoch in range(3) for seed in range(3)}
    assert len(orders) == 9
