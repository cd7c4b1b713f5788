import pytest

from slime_core.errors import DataError
from slime_rollout.config import RolloutConfig
from slime_rollout.data import notes
from slime_rollout.data.notes import data_notes

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
USER, ANSWER = {"role": "user", "content": "How warm?"}, {"role": "assistant", "content": "7"}
CALLED = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "7"}, ANSWER]
THOUGHT = [USER, ANSWER | {"reasoning_content": "hm"}, USER, ANSWER | {"reasoning_content": "hm"}]


@pytest.fixture
def model(chat_tokenizers, build_tokenizer, tmp_path):
    """Saves a tokenizer of a family, or one as SmolLM2's, and returns its directory."""

    def save(family):
        tokenizer = build_tokenizer(PLAIN) if family == "plain" else chat_tokenizers[family]
        tokenizer.save_pretrained(tmp_path / family)
        return str(tmp_path / family)

    return save


def config(model, path, **flags):
    given = {"hf_checkpoint": model, "prompt_data": path, "rollout_batch_size": 1, "rm_type": "random"}
    return RolloutConfig.of(**(given | flags))


def test_nothing_is_said_of_plain_rows_and_no_tokenizer_is_loaded(write_rows):
    path = write_rows([{"prompt": "a"}, {"prompt": [USER]}])
    assert data_notes(config("none", path, apply_chat_template=True), "prompts") == []
    assert data_notes(config("none", write_rows([{"messages": [USER, ANSWER]}])), "conversations") == []
    assert data_notes(config("none", write_rows([{"prompt": "a", "chosen": "b", "rejected": "c"}])), "pairs") == []


def test_how_other_projects_rows_are_read_is_said_once_for_each_file(write_rows):
    alpaca = {"instruction": "Add.", "input": "2 + 2", "output": "4"}
    first, second = write_rows([alpaca] * 9, "a.jsonl"), write_rows([alpaca, {"messages": [USER, ANSWER]}], "b.jsonl")
    said = "read as Alpaca's: the user says instruction, and input on a line of its own; output is the assistant's"
    lines = data_notes(config("none", (first, second)), "conversations")
    assert lines == [f"{first}: {said}", f"{second}: {said} (1 of 2 rows)"]


def test_what_is_left_out_of_prompts_is_counted(model, write_rows):
    path = write_rows([{"prompt": [USER], "tools": TOOLS}, {"prompt": CALLED[:3]}, {"prompt": [USER]}, {"prompt": "a"}])
    given = config(model("plain"), path, apply_chat_template=True)
    (line,) = data_notes(given, "prompts")
    assert line == (
        f"{path}: the chat template leaves out, of 4 rows: tools (in 1), tool calls (in 1), arguments of tool calls "
        "(in 1)"
    )
    held_out = given.changed(prompt_data=write_rows([{"prompt": "a"}], "train.jsonl"), eval_prompt_data=("own", path))
    assert data_notes(held_out, "prompts") == [line]
    assert data_notes(config(model("qwen3"), path, apply_chat_template=True), "prompts") == []
    # A user-defined function renders them.
    assert data_notes(config(model("plain"), path, custom_generate_function_path="own.py:generate"), "prompts") == []


def test_calls_that_are_to_be_trained_on_and_disappear_are_refused_unless_asked_for(model, write_rows):
    path = write_rows([{"messages": [USER, ANSWER]}, {"messages": CALLED, "tools": TOOLS}])
    given = config(model("plain"), path)
    with pytest.raises(DataError) as caught:
        data_notes(given, "conversations")
    assert str(caught.value) == (
        f"{path}: the chat template leaves out what is to be trained on, of 2 rows: tool calls (in 1), arguments of "
        f"tool calls (in 1), first {path}:2; use a model whose template writes it, leave such turns out with "
        '"step_loss_mask": 0, or train without it with --allow-left-out'
    )
    (line,) = data_notes(given.changed(allow_left_out=True), "conversations")
    assert {"tools (in 1)", "tool calls (in 1)"} < set(line.partition("of 2 rows: ")[2].partition(";")[0].split(", "))
    assert line.endswith("; and is to be trained on: tool calls (in 1), arguments of tool calls (in 1)")
    assert data_notes(config(model("llama3"), path), "conversations") == []
    # Only the last turn is trained on, or this one is left out.
    assert len(data_notes(given.changed(loss_mask_type="distill_qwen"), "conversations")) == 1
    left = [CALLED[0], CALLED[1] | {"step_loss_mask": 0}, *CALLED[2:]]
    assert len(data_notes(config(model("plain"), write_rows([{"messages": left}])), "conversations")) == 1


def test_earlier_thinking_that_is_to_be_trained_on(model, write_rows):
    path = write_rows([{"messages": THOUGHT}])
    with pytest.raises(DataError, match=r"trained on, of 1 rows: thinking of earlier turns \(in 1\), first .*:1; "):
        data_notes(config(model("qwen3"), path), "conversations")
    (line,) = data_notes(config(model("qwen3"), path, loss_mask_type="distill_qwen"), "conversations")
    assert line == f"{path}: the chat template leaves out, of 1 rows: thinking of earlier turns (in 1)"
    # What is given does not concern the loss.
    pair = {"prompt": THOUGHT[:3], "chosen": [THOUGHT[3]], "rejected": [ANSWER | {"content": "8"}]}
    path = write_rows([pair], "pairs.jsonl")
    (line,) = data_notes(config(model("qwen3"), path), "pairs")
    assert line == f"{path}: the chat template leaves out, of 1 rows: thinking of earlier turns (in 1)"
    with pytest.raises(DataError, match=r"trained on, of 1 rows: thinking \(in 1\)"):
        data_notes(config(model("plain"), path), "pairs")


def test_a_history_that_is_written_otherwise_is_said(model, write_rows):
    path = write_rows([{"messages": [USER, ANSWER, USER, ANSWER]}, {"messages": [USER, ANSWER]}])
    (line,) = data_notes(config(model("qwen3"), path), "conversations")
    assert "writes earlier turns otherwise once more messages follow, in 1 of 2 rows" in line
    assert data_notes(config(model("llama3"), path), "conversations") == []


def test_a_prompt_that_ends_with_an_answer_is_said(model, write_rows):
    path = write_rows([{"conversations": [USER, ANSWER]}, {"conversations": [USER]}])
    given = config(model("plain"), path, apply_chat_template=True, input_key="conversations")
    (line,) = data_notes(given, "prompts")
    assert (
        line == f"{path}: 1 of 2 rows end with a message of the assistant's, and the model is asked to answer once more"
    )


def test_of_a_large_file_some_rows_are_looked_at_from_its_beginning_to_its_end(model, write, tmp_path, monkeypatch):
    path = tmp_path / "p.json"
    rows = [{"prompt": [USER], "n": place} for place in range(2000)]
    rows[0]["tools"] = rows[-1]["tools"] = TOOLS
    write(rows, path)
    seen = []
    check = notes._TALKS["prompts"]
    monkeypatch.setitem(notes._TALKS, "prompts", lambda raw, given: seen.append(check(raw, given)) or seen[-1])
    (line,) = data_notes(config(model("plain"), str(path), apply_chat_template=True), "prompts")
    places = sorted(row.metadata["n"] for row, _ in seen)
    assert len(places) <= notes.MOST_ROWS
    assert places[0] == 0
    assert max(after - before for before, after in zip(places, [*places[1:], 2000], strict=True)) <= 2000 / 128
    assert line.endswith(f"leaves out, of the {len(places)} rows of 2000 that were looked at: tools (in 1)")


def test_time_is_bounded(model, write_rows, monkeypatch):
    path = write_rows([{"prompt": [USER], "tools": TOOLS}] * 50)
    monkeypatch.setattr(notes, "MOST_SECONDS", 0.0)
    (line,) = data_notes(config(model("plain"), path, apply_chat_template=True), "prompts")
    assert "of the 1 rows of 50 that were looked at: tools (in 1)" in line


def test_of_a_stream_the_first_rows_are_looked_at(model, write_rows):
    path = write_rows([{"prompt": [USER], "tools": TOOLS}] * 150)
    given = config(model("plain"), path, apply_chat_template=True, streaming_data=True)
    (line,) = data_notes(given, "prompts")
    assert "of the 100 rows of a stream that were looked at: tools (in 100)" in line


def test_bad_rows_and_models_without_a_template_are_told_elsewhere(model, write_rows, tmp_path):
    path = write_rows([{"messages": CALLED}, {"messages": []}])
    assert data_notes(config(str(tmp_path / "none"), path), "conversations") == []
    with pytest.raises(DataError, match=r"of the 1 rows of 2 that were looked at: tool calls \(in 1\)"):
        data_notes(config(model("plain"), path), "conversations")
