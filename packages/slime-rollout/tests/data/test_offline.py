import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.ops import sft_objective
from slime_core.ops.preference import dpo_pair_loss, reward_model_loss
from slime_core.types import Status
from slime_rollout.data import (
    ChatEncoder,
    Fate,
    PreferenceDataset,
    PreferenceEncoder,
    PreferenceFields,
    PreferenceRow,
    RolloutDataSource,
    SftDataset,
    SftFields,
    preference_batch,
    read_preferences,
    read_sft,
)


def chat(*answers):
    return [{"role": role, "content": text} for text in answers for role in ("user", "assistant")]


@pytest.fixture
def encoder(chat_tokenizers):
    return ChatEncoder(chat_tokenizers["qwen3"])


def test_a_row_keeps_all_it_says(write_rows):
    tools = [{"name": "f"}]
    path = write_rows(
        [
            {"messages": chat("a"), "tools": json.dumps(tools), "level": 3, "metadata": {"source": "sums"}},
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "tools": []},
        ]
    )
    first, second = read_sft(path)
    assert (first.messages, first.tools) == (chat("a"), tools)
    assert first.metadata == {"level": 3, "source": "sums"}
    assert second.messages == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert (second.where, second.tools) == (f"{path}:2", None)
    assert [row.where for row in read_sft(f"{path}@[1:]")] == [f"{path}:2"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"messages": [', "invalid JSON"),
        ("[]", "must be a JSON object, got an empty list"),
        ('{"text": "a"}', "no field 'messages' or 'conversations' for the conversation; the row has ['text']"),
        ('{"messages": "a"}', "'messages' must be a list of chat messages, got a string"),
        ('{"messages": []}', "got an empty list"),
        ('{"messages": ["a"]}', "'messages', message 1 must be an object"),
        ('{"messages": [{"content": "a"}]}', "message 1 needs a 'role'"),
        ('{"messages": [{"role": "user", "content": null}]}', "message 1 needs 'content' as a string, got null"),
        ('{"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}', "'tool_calls' must be a list"),
        ('{"messages": [{"role": "user", "content": "a", "reasoning_content": 5}]}', "must be a string, got a number"),
        ('{"messages": [{"role": "user", "content": "a", "step_loss_mask": 2}]}', "must be 0 or 1, got 2"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message is the assistant's"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "message 1 is the assistant's; begin with"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": "{"}',
            "JSON",
        ),
        ('{"messages": [{"from": "human", "value": "a"}, {"from": "gpt", "value": 7}]}', "got a number"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path, line, words):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"messages": chat("good")}) + "\n\n" + line + "\n")
    with pytest.raises(DataError) as caught:
        read_sft(str(path))
    assert str(caught.value).startswith(f"{path}:3: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_serve(tmp_path, write_rows):
    with pytest.raises(DataError, match="does not exist"):
        read_sft(str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match=r"is a directory that datasets\.save_to_disk did not write"):
        read_sft(str(tmp_path))
    with pytest.raises(DataError, match="is empty"):
        read_sft(write_rows([]))
    with pytest.raises(DataError, match="no field 'talk' for the conversation"):
        read_sft(write_rows([{"messages": chat("a")}]), SftFields(messages_key="talk"))


@pytest.mark.parametrize("key", ["step_loss_mask", "reasoning_content"])
def test_what_sharegpt_messages_have_besides_is_kept(write_rows, key):
    value = 0 if key == "step_loss_mask" else "hm"
    talk = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", key: value}]
    (row,) = read_sft(write_rows([{"conversations": talk}]))
    assert row.messages[1] == {"role": "assistant", "content": "b", key: value}


def test_a_call_without_content_is_the_same_in_columns(write_rows, write, tmp_path):
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    write([{"messages": messages}], tmp_path / "p.parquet")
    path = write_rows([{"messages": messages}])
    assert [row.messages for row in read_sft(path)] == [row.messages for row in read_sft(str(tmp_path / "p.parquet"))]
    assert read_sft(path)[0].messages == messages


def test_bad_rows_are_counted_and_can_be_skipped(write_rows, chat_tokenizers, caplog):
    calls = [{"function": {"name": "f", "arguments": {}}}] * 2
    refused = [*chat("a")[:1], {"role": "assistant", "content": "", "tool_calls": calls}]
    path = write_rows([{"messages": chat("a")}, {"messages": []}, {"messages": refused}, {"messages": chat("b")}])
    encoder = ChatEncoder(chat_tokenizers["llama3"])
    with pytest.raises(DataError, match=rf"^{path}:2: .*an empty list \(2 of 4 rows of {path} are bad; .* skip\)$"):
        SftDataset.load(path, encoder)
    assert len(SftDataset.load(path, encoder, on_bad_data="skip")) == 2
    assert f"skipped 2 of 4 rows: {path}:2: " in caplog.text
    assert f"{path}:3: the chat template refuses the messages: one tool call at a time" in caplog.text
    assert len(read_sft(path, on_bad_data="skip")) == 3


def test_a_sample_trains_on_the_answers(write_rows, encoder, chat_tokenizers):
    dataset = SftDataset.load(write_rows([{"messages": chat("a", "b"), "level": 3}]), encoder)
    (sample,) = dataset.group(0, group_index=4, first_index=4, size=1)
    decode = chat_tokenizers["qwen3"].decode
    assert decode(sample.prompt_tokens) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert sample.response == decode(sample.response_tokens)
    assert sample.response.startswith("a<|im_end|>\n<|im_start|>user")
    trained = [token for token, kept in zip(sample.response_tokens, sample.trained_mask, strict=True) if kept]
    assert decode(trained) == "a<|im_end|><think>\n\n</think>\n\nb<|im_end|>"
    assert (sample.index, sample.status, sample.metadata) == (4, Status.COMPLETED, {"level": 3})
    log_probs = torch.full((sample.response_length,), -2.0)
    loss, _ = sft_objective(log_probs, torch.tensor(sample.trained_mask) / sample.trained_tokens)
    assert loss.item() == pytest.approx(2.0)


def test_truncation(write_rows, encoder, caplog):
    path = write_rows([{"messages": chat("a" * 40)}, {"messages": chat("a")}])

    def samples(max_length=None):
        dataset = SftDataset.load(path, encoder, max_length=max_length)
        return [dataset.group(place, group_index=0, first_index=0, size=1)[0] for place in range(len(dataset))]

    long, short = samples()
    size = len(short.tokens)
    cut, _ = samples(len(long.tokens) - 5)
    assert (cut.status, cut.tokens) == (Status.TRUNCATED, long.tokens[:-5])
    assert cut.loss_mask == long.loss_mask[:-5]
    dataset = SftDataset.load(path, encoder, max_length=size)
    assert len(dataset) == 1
    assert f"of 2 conversations left out 1 without a trained token within {size} tokens, and cut 0" in caplog.text
    with pytest.raises(DataError, match="none of the 2 conversations has a trained token within 3"):
        SftDataset.load(path, encoder, max_length=3)


def test_a_data_source_deals_out_conversations_and_resumes(write_rows, encoder):
    path = write_rows([{"messages": chat(str(number))} for number in range(5)])
    source, other = (
        RolloutDataSource(SftDataset.load(path, encoder), samples_per_prompt=1, shuffle=True, seed=3) for _ in range(2)
    )
    source.ledger.settle(source.get_samples(7), Fate.TRAINED)
    other.load_state_dict(source.state_dict())
    assert other.get_samples(6) == source.get_samples(6)
    assert source.epoch == 2


def test_a_template_that_refuses_names_the_row(write_rows, chat_tokenizers):
    calls = [{"function": {"name": "f", "arguments": {}}}] * 2
    path = write_rows([{"messages": [*chat("a")[:1], {"role": "assistant", "content": "", "tool_calls": calls}]}])
    with pytest.raises(DataError, match=rf"^{path}:1: the chat template refuses the messages: one tool call at a time"):
        SftDataset.load(path, ChatEncoder(chat_tokenizers["llama3"]))


USER = {"role": "user", "content": "2 + 2?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("4", "5"))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": "4", "rejected": "5"},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "2 + 2?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"question": "2 + 2?", "chosen": GOOD, "rejected": BAD},
        {
            "chosen": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}],
            "rejected": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "5"}],
        },
    ],
)
def test_chat_pairs_come_to_one_form(write_rows, row):
    (pair,) = read_preferences(write_rows([row]))
    assert (pair.prompt, pair.chosen, pair.rejected) == ([USER], [GOOD], [BAD])


def test_text_pairs_and_further_fields(write_rows):
    path = write_rows(
        [
            {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5", "margin": 2, "level": 1, "metadata": {"a": "b"}},
            {"instruction": "2 + 2 =", "chosen_response": " 4", "rejected_response": " 5"},
            {"input": "2 + 2 =", "preferred": " 4", "dispreferred": " 5"},
        ]
    )
    pairs = read_preferences(path)
    assert {(pair.prompt, pair.chosen, pair.rejected) for pair in pairs} == {("2 + 2 =", " 4", " 5")}
    assert (pairs[0].margin, pairs[0].metadata) == (2.0, {"level": 1, "a": "b"})
    assert (pairs[1].margin, pairs[1].metadata, pairs[1].where) == (None, {}, f"{path}:2")


def test_the_shared_beginning_leaves_each_side_an_answer(write_rows):
    (pair,) = read_preferences(write_rows([{"chosen": [USER, GOOD], "rejected": [USER, GOOD, USER, BAD]}]))
    assert (pair.prompt, pair.chosen, pair.rejected) == ([USER], [GOOD], [GOOD, USER, BAD])


def test_named_fields(write_rows):
    path = write_rows([{"q": "a", "win": "b", "lose": "c", "by": 1, "prompt": "not this"}])
    fields = PreferenceFields(prompt_key="q", chosen_key="win", rejected_key="lose", margin_key="by")
    (pair,) = read_preferences(path, fields)
    assert (pair.prompt, pair.chosen, pair.rejected, pair.margin) == ("a", "b", "c", 1.0)
    assert pair.metadata == {"prompt": "not this"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "rejected": "b"}, "no field 'chosen' or 'chosen_response' or 'preferred'"),
        ({"prompt": "a", "chosen": "b"}, "for the rejected response; the row has ['chosen', 'prompt']"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "'chosen' and 'rejected' are the same"),
        (
            {"prompt": "a", "chosen": "", "rejected": "b"},
            "'chosen' must be a string or a list of chat messages, got an empty string",
        ),
        ({"prompt": "a", "chosen": 4, "rejected": "b"}, "got a number"),
        ({"chosen": "b", "rejected": "c"}, "for the prompt; the row has ['chosen', 'rejected']"),
        ({"prompt": "a", "chosen": "b", "rejected": [BAD]}, "one response is text and the other chat messages"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "the pair has no prompt"),
        ({"chosen": [USER, GOOD], "rejected": [{"role": "user", "content": "?"}, BAD]}, "the pair has no prompt"),
        ({"prompt": "a", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "got the roles ['user', 'assistant']"),
        ({"prompt": "a", "chosen": [GOOD, USER], "rejected": [BAD]}, "the chosen response must begin and end with"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}, "'margin' must be a number, got a string"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": True}, "got true or false"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "metadata": 1}, "'metadata' must be an object"),
        ({"prompt": [{"role": "user"}], "chosen": "b", "rejected": "c"}, "'prompt', message 1 needs 'content'"),
    ],
)
def test_a_bad_pair_is_named_with_its_line(write_rows, row, words):
    path = write_rows([{"prompt": "a", "chosen": "b", "rejected": "c"}, row])
    with pytest.raises(DataError) as caught:
        read_preferences(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert words in str(caught.value)
    assert json.dumps(str(caught.value)).count("\\n") == 0


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def pair_encoder(chat_tokenizers):
    tokenizer = chat_tokenizers["llama3"]
    return PreferenceEncoder(tokenizer, ChatEncoder(tokenizer))


def load_pairs(write_rows, pair_encoder, rows, **how):
    return PreferenceDataset.load(write_rows(rows), pair_encoder, **how)


@settings(max_examples=25)
@given(prompt=texts, chosen=texts, rejected=texts, cut=st.integers(1, 40))
def test_text_pairs_share_the_prompts_tokens(pair_encoder, chat_tokenizers, prompt, chosen, rejected, cut):
    tokenizer = chat_tokenizers["llama3"]
    row = PreferenceRow(where="f:1", prompt=prompt, chosen=chosen, rejected=rejected)
    for side, text in zip(pair_encoder.encode(row), (chosen, rejected), strict=True):
        start = side.prompt_length
        assert side.tokens[:start] == tokenizer(prompt)["input_ids"]
        assert tokenizer.decode(side.tokens[start:]) == text + "<|eot_id|>"
        assert set(side.loss_mask[start:]) == {1}
    for whole, short in zip(pair_encoder.encode(row), pair_encoder.encode(row, max_length=cut), strict=True):
        assert (short.tokens, short.loss_mask) == (whole.tokens[:cut], whole.loss_mask[:cut])


def test_chat_pairs_train_on_what_follows_the_prompt(write_rows, pair_encoder, chat_tokenizers):
    history = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    dataset = load_pairs(write_rows, pair_encoder, [{"prompt": history, "chosen": "yes", "rejected": "no", "level": 2}])
    chosen, rejected = dataset.group(0, group_index=3, first_index=6, size=2)
    assert (chosen.response, rejected.response) == ("yes<|eot_id|>", "no<|eot_id|>")
    assert chosen.prompt_tokens == rejected.prompt_tokens
    assert (chosen.index, rejected.index, chosen.group_index, rejected.group_index) == (6, 7, 3, 3)
    assert (chosen.reward, rejected.reward) == (1.0, 0.0)
    assert (chosen.prompt, chosen.metadata) == (history, {"level": 2})
    with pytest.raises(DataError, match="set samples_per_prompt to 2"):
        dataset.group(0, group_index=0, first_index=0, size=1)


def test_batches_fit_the_losses(write_rows, pair_encoder):
    rows = [{"prompt": "a", "chosen": "bb" * n, "rejected": "c", "margin": n / 2} for n in (1, 2, 3)]
    source = RolloutDataSource(load_pairs(write_rows, pair_encoder, rows), samples_per_prompt=2)
    batch = preference_batch(source.get_samples(3))
    tokens = sum(batch.lengths)
    assert len(batch.loss_mask) == tokens == sum(sample.response_length for sample in batch.samples)
    generator = torch.Generator().manual_seed(0)
    policy, reference = (-torch.rand(tokens, generator=generator, dtype=torch.float64) for _ in range(2))
    loss, chosen, rejected = dpo_pair_loss(
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
    dataset = load_pairs(
        write_rows,
        PreferenceEncoder(tokenizer, ChatEncoder(tokenizer)),
        [{"prompt": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": "c"}],
    )
    batch = preference_batch([dataset.group(0, group_index=0, first_index=0, size=2)])
    ends = [sample.tokens[place] for sample, place in zip(batch.samples, batch.score_positions, strict=True)]
    assert ends == [tokenizer.eos_token_id] * 2
    assert batch.margins is None


def test_pairs_that_the_limit_makes_useless_are_left_out(write_rows, pair_encoder, caplog):
    rows = [
        {"prompt": "a", "chosen": "xy" * 9 + "!", "rejected": "xy" * 9 + "?"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
    ]
    assert len(load_pairs(write_rows, pair_encoder, rows, max_length=8)) == 1
    assert (
        "of 2 pairs left out 1 with an empty response, or two that do not differ, within 8 tokens, and cut 0"
        in caplog.text
    )
    with pytest.raises(DataError, match="none of the 2 pairs differs within 1 tokens"):
        load_pairs(write_rows, pair_encoder, rows, max_length=1)


def test_bad_pairs_are_counted_and_can_be_skipped(write_rows, pair_encoder, caplog):
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    rows = [good, {**good, "rejected": "b"}, {"chosen": "b"}, good]
    with pytest.raises(DataError, match=r":2: 'chosen' and 'rejected' are the same.* \(2 of 4 rows of .* are bad"):
        load_pairs(write_rows, pair_encoder, rows)
    assert len(load_pairs(write_rows, pair_encoder, rows, on_bad_data="skip")) == 2
    assert "skipped 2 of 4 rows" in caplog.text
    assert len(read_preferences(write_rows(rows), on_bad_data="skip")) == 2


def test_order_and_state(write_rows, pair_encoder):
    rows = [{"prompt": str(n), "chosen": "b", "rejected": "c"} for n in range(4)]
    dataset = load_pairs(write_rows, pair_encoder, rows)
    source, other = (RolloutDataSource(dataset, samples_per_prompt=2, shuffle=True, seed=1) for _ in range(2))
    source.ledger.settle(source.get_samples(3), Fate.TRAINED)
    other.load_state_dict(source.state_dict())
    assert preference_batch(other.get_samples(5)) == preference_batch(source.get_samples(5))


def test_groups_that_are_no_pairs(write_rows, pair_encoder):
    group = load_pairs(write_rows, pair_encoder, [{"prompt": "a", "chosen": "b", "rejected": "c"}]).group(
        0, group_index=0, first_index=0, size=2
    )
    with pytest.raises(DataError, match=r"a chosen and a rejected sample, rewards 1 and 0; got \[0.0, 1.0\]"):
        preference_batch([group[::-1]])


def test_chat_without_a_chat_encoder(write_rows, chat_tokenizers):
    row = {"prompt": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": "c"}
    with pytest.raises(
        DataError, match=r":1: the pair is chat messages, and there is no chat template; write it as text"
    ):
        load_pairs(write_rows, PreferenceEncoder(chat_tokenizers["llama3"]), [row])
