import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.ops.preference import dpo_loss, reward_model_loss
from slime_rollout.data import (
    ChatEncoder,
    Fate,
    PreferenceDataset,
    PreferenceEncoder,
    PreferenceRow,
    RolloutDataSource,
    preference_batch,
    read_preferences,
)

texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def encoder(chat_tokenizers):
    tokenizer = chat_tokenizers["llama3"]
    return PreferenceEncoder(tokenizer, ChatEncoder(tokenizer))


def load(write_rows, encoder, rows, **how):
    return PreferenceDataset.load(write_rows(rows), encoder, **how)


@settings(max_examples=25)
@given(prompt=texts, chosen=texts, rejected=texts, cut=st.integers(1, 40))
def test_text_pairs_share_the_prompts_tokens(encoder, chat_tokenizers, prompt, chosen, rejected, cut):
    tokenizer = chat_tokenizers["llama3"]
    row = PreferenceRow(where="f:1", prompt=prompt, chosen=chosen, rejected=rejected)
    for side, text in zip(encoder.encode(row), (chosen, rejected), strict=True):
        start = side.prompt_length
        assert side.tokens[:start] == tokenizer(prompt)["input_ids"]
        assert tokenizer.decode(side.tokens[start:]) == text + "<|eot_id|>"
        assert set(side.loss_mask[start:]) == {1}
    for whole, short in zip(encoder.encode(row), encoder.encode(row, max_length=cut), strict=True):
        assert (short.tokens, short.loss_mask) == (whole.tokens[:cut], whole.loss_mask[:cut])


def test_chat_pairs_train_on_what_follows_the_prompt(write_rows, encoder, chat_tokenizers):
    history = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    dataset = load(write_rows, encoder, [{"prompt": history, "chosen": "yes", "rejected": "no", "level": 2}])
    chosen, rejected = dataset.group(0, group_index=3, first_index=6, size=2)
    assert (chosen.response, rejected.response) == ("yes<|eot_id|>", "no<|eot_id|>")
    assert chosen.prompt_tokens == rejected.prompt_tokens
    assert (chosen.index, rejected.index, chosen.group_index, rejected.group_index) == (6, 7, 3, 3)
    assert (chosen.reward, rejected.reward) == (1.0, 0.0)
    assert (chosen.prompt, chosen.metadata) == (history, {"level": 2})
    with pytest.raises(DataError, match="set samples_per_prompt to 2"):
        dataset.group(0, group_index=0, first_index=0, size=1)


def test_batches_fit_the_losses(write_rows, encoder):
    rows = [{"prompt": "a", "chosen": "bb" * n, "rejected": "c", "margin": n / 2} for n in (1, 2, 3)]
    source = RolloutDataSource(load(write_rows, encoder, rows), samples_per_prompt=2)
    batch = preference_batch(source.get_samples(3))
    tokens = sum(batch.lengths)
    assert len(batch.loss_mask) == tokens == sum(sample.response_length for sample in batch.samples)
    generator = torch.Generator().manual_seed(0)
    policy, reference = (-torch.rand(tokens, generator=generator, dtype=torch.float64) for _ in range(2))
    loss, chosen, rejected = dpo_loss(
        policy, reference, mask_T=torch.tensor(batch.loss_mask), lengths=batch.lengths, beta=0.1
    )
    start, rewards = 0, []
    for sample in batch.samples:  # every response's sum by itself
        rewards.append(0.1 * (policy - reference)[start : start + sample.response_length].sum())
        start += sample.response_length
    torch.testing.assert_close(chosen, torch.stack(rewards[0::2]))
    torch.testing.assert_close(rejected, torch.stack(rewards[1::2]))
    assert batch.margins == [0.5, 1.0, 1.5]
    assert len(reward_model_loss(chosen, rejected, margins_P=torch.tensor(batch.margins, dtype=torch.float64))) == 3
    assert loss.shape == (3,)


def test_scores_are_read_at_the_end_of_turn(write_rows, chat_tokenizers):
    tokenizer = chat_tokenizers["qwen3"]  # writes a newline behind it
    dataset = load(
        write_rows,
        PreferenceEncoder(tokenizer, ChatEncoder(tokenizer)),
        [{"prompt": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": "c"}],
    )
    batch = preference_batch([dataset.group(0, group_index=0, first_index=0, size=2)])
    ends = [sample.tokens[place] for sample, place in zip(batch.samples, batch.score_positions, strict=True)]
    assert ends == [tokenizer.eos_token_id] * 2
    assert batch.margins is None


def test_pairs_that_the_limit_makes_useless_are_left_out(write_rows, encoder, caplog):
    rows = [
        {"prompt": "a", "chosen": "xy" * 9 + "!", "rejected": "xy" * 9 + "?"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
    ]
    assert len(load(write_rows, encoder, rows, max_length=8)) == 1
    assert "of 2 pairs left out 1 that do not differ within 8 tokens, and cut 0" in caplog.text
    with pytest.raises(DataError, match="none of the 2 pairs differs within 1 tokens"):
        load(write_rows, encoder, rows, max_length=1)


def test_bad_pairs_are_counted_and_can_be_skipped(write_rows, encoder, caplog):
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    rows = [good, {**good, "rejected": "b"}, {"chosen": "b"}, good]
    with pytest.raises(DataError, match=r":2: 'chosen' and 'rejected' are the same.* \(2 of 4 rows of .* are bad"):
        load(write_rows, encoder, rows)
    assert len(load(write_rows, encoder, rows, on_bad_data="skip")) == 2
    assert "skipped 2 of 4 rows" in caplog.text
    assert len(read_preferences(write_rows(rows), on_bad_data="skip")) == 2


def test_order_and_state(write_rows, encoder):
    rows = [{"prompt": str(n), "chosen": "b", "rejected": "c"} for n in range(4)]
    dataset = load(write_rows, encoder, rows)
    source, other = (RolloutDataSource(dataset, samples_per_prompt=2, shuffle=True, seed=1) for _ in range(2))
    source.ledger.settle(source.get_samples(3), Fate.TRAINED)
    other.load_state_dict(source.state_dict())
    assert preference_batch(other.get_samples(5)) == preference_batch(source.get_samples(5))


def test_groups_that_are_no_pairs(write_rows, encoder):
    group = load(write_rows, encoder, [{"prompt": "a", "chosen": "b", "rejected": "c"}]).group(
        0, group_index=0, first_index=0, size=2
    )
    with pytest.raises(DataError, match=r"a chosen and a rejected sample, rewards 1 and 0; got \[0.0, 1.0\]"):
        preference_batch([group[::-1]])


def test_chat_without_a_chat_encoder(write_rows, chat_tokenizers):
    row = {"prompt": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": "c"}
    with pytest.raises(DataError, match=r":1: the pair is chat messages; give a ChatEncoder"):
        load(write_rows, PreferenceEncoder(chat_tokenizers["llama3"]), [row])
