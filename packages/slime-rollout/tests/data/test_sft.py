import json

import pytest
import torch

from slime_core.errors import DataError
from slime_core.ops.sft import sft_objective
from slime_core.types import Status
from slime_rollout.data import ChatEncoder, Fate, RolloutDataSource, SftDataset, SftFields, read_sft, sft_sample


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
    (row,) = read_sft(write_rows([{"messages": chat("a", "b"), "level": 3}]))
    sample = sft_sample(row, encoder, index=4)
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
    long, short = (sft_sample(row, encoder, index=0) for row in read_sft(path))
    size = len(short.tokens)
    (row, _) = read_sft(path)
    with pytest.raises(DataError, match=rf"{path}:1: there is nothing to train on among the first {size} tokens"):
        sft_sample(row, encoder, index=0, max_length=size)
    cut = sft_sample(row, encoder, index=0, max_length=len(long.tokens) - 5)
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
