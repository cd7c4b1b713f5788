"""Rows as other projects' pages describe them, in every format of files, and what is said of each."""

import pytest

from slime_core.errors import DataError
from slime_rollout.config import RolloutConfig
from slime_rollout.data import SftFields, check_prompt_file, read_preferences, read_sft
from slime_rollout.data.forms import FORMS

SUFFIXES = (".jsonl", ".json", ".json.gz", ".jsonl.zst", ".parquet", "")


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "Be brief."}
GIVEN = assistant("4", step_loss_mask=0)
CONVERSATIONS = {
    "TRL: prompt and completion": ({"prompt": "2 + 2?", "completion": "4"}, [user("2 + 2?"), assistant("4")]),
    "TRL: the same in messages": (
        {"prompt": [user("1?"), assistant("4"), user("2?")], "completion": [assistant("5")]},
        [user("1?"), GIVEN, user("2?"), assistant("5")],
    ),
    "TRL: messages": ({"messages": [user("a"), assistant("b")]}, [user("a"), assistant("b")]),
    "Alpaca": ({"instruction": "Add.", "input": "2 + 2", "output": "4"}, [user("Add.\n2 + 2"), assistant("4")]),
    "Alpaca without input": (
        {"instruction": "Add 2 + 2.", "input": "", "output": "4"},
        [user("Add 2 + 2."), assistant("4")],
    ),
    "Alpaca with all": (
        {"instruction": "And 2?", "output": "5", "system": "Be brief.", "history": [["1?", "4"]]},
        [SYSTEM, user("1?"), GIVEN, user("And 2?"), assistant("5")],
    ),
    "OpenRLHF": ({"input": "2 + 2?", "output": "4"}, [user("2 + 2?"), assistant("4")]),
    "OpenRLHF in messages": ({"input": [user("2 + 2?")], "output": "4"}, [user("2 + 2?"), assistant("4")]),
    "verl": ({"prompt": "2 + 2?", "response": "4"}, [user("2 + 2?"), assistant("4")]),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "Be brief."},
        [SYSTEM, user("a"), assistant("b")],
    ),
    "a system message of its own wins": (
        {"messages": [SYSTEM, user("a"), assistant("b")], "system": "Be long."},
        [SYSTEM, user("a"), assistant("b")],
    ),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations(write, tmp_path, suffix, name):
    row, messages = CONVERSATIONS[name]
    path = tmp_path / f"p{suffix}"
    write([row, row], path)
    for read in read_sft(str(path)):
        assert read.messages == messages
        assert bool(read.said) == (name not in ("TRL: messages", "a system message of its own wins"))
        assert read.metadata == ({"system": "Be long."} if "wins" in name else {})


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_question_and_its_answer_are_named_by_flags(write, tmp_path, suffix):
    path = tmp_path / f"p{suffix}"
    write([{"question": "2 + 2?", "extra": {"answer": "4"}}], path)
    (row,) = read_sft(str(path), SftFields(messages_key="question", answer_key="extra.answer"))
    assert row.messages == [user("2 + 2?"), assistant("4")]
    assert row.said == "question is given, extra.answer is trained on"
    advice = "--input-key; or what is answered so, and its answer with --label-key"
    with pytest.raises(DataError, match=advice):
        read_sft(str(path))
    with pytest.raises(DataError, match=r"no field 'solution' for the answer; .*--label-key"):
        read_sft(str(path), SftFields(messages_key="question", answer_key="solution"))


PAIRS = {
    "TRL: explicit prompt": ({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, ("2 + 2?", "4", "5")),
    "TRL: implicit prompt": (
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        ("The sky is", " blue.", " green."),
    ),
    "Anthropic's dialogues": (
        {"chosen": "\n\nHuman: 2?\n\nAssistant: It is 4", "rejected": "\n\nHuman: 2?\n\nAssistant: It was"},
        ("\n\nHuman: 2?\n\nAssistant: It", " is 4", " was"),
    ),
    "one side is the beginning of the other": ({"chosen": "a b\n", "rejected": "a b\nc"}, ("a", " b\n", " b\nc")),
    "TRL: implicit prompt in messages": (
        {"chosen": [user("2?"), assistant("4")], "rejected": [user("2?"), assistant("5")]},
        ([user("2?")], [assistant("4")], [assistant("5")]),
    ),
    "OpenRLHF": (
        {"prompt": [user("2?")], "chosen": [assistant("4")], "rejected": [assistant("5")]},
        ([user("2?")], [assistant("4")], [assistant("5")]),
    ),
    "Alpaca": (
        {"instruction": "Add.", "input": "2 + 2", "chosen": "4", "rejected": "5"},
        ("Add.\n2 + 2", "4", "5"),
    ),
    "ShareGPT": (
        {
            "conversations": [{"from": "human", "value": "2?"}],
            "chosen": {"from": "gpt", "value": "4"},
            "rejected": {"from": "gpt", "value": "5"},
        },
        ([user("2?")], [assistant("4")], [assistant("5")]),
    ),
    "a field for the system": (
        {"system": "Be brief.", "question": "2?", "chosen": "4", "rejected": "5"},
        ([SYSTEM, user("2?")], [assistant("4")], [assistant("5")]),
    ),
    "the same beside whole conversations": (
        {"system": "Be brief.", "chosen": [user("2?"), assistant("4")], "rejected": [user("2?"), assistant("5")]},
        ([SYSTEM, user("2?")], [assistant("4")], [assistant("5")]),
    ),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", PAIRS)
def test_pairs(write, tmp_path, suffix, name):
    row, expected = PAIRS[name]
    path = tmp_path / f"p{suffix}"
    write([row], path)
    (pair,) = read_preferences(str(path))
    assert (pair.prompt, pair.chosen, pair.rejected) == expected
    assert pair.metadata == {}


def prompts(path, **flags):
    given = {"hf_checkpoint": "none", "prompt_data": str(path), "rollout_batch_size": 1, "apply_chat_template": True}
    return check_prompt_file(str(path), RolloutConfig.of(**given, **flags))


VERL = {
    "data_source": "gsm8k",
    "prompt": [user("2 + 2?")],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 1, "tool": {"specs": '[{"name": "add"}]'}},
}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_field_inside_an_object_is_named_by_both_names(write, tmp_path, suffix):
    path = tmp_path / f"p{suffix}"
    write([VERL], path)
    keys = {"label_key": "reward_model.ground_truth", "metadata_key": "extra_info", "tool_key": "extra_info.tool.specs"}
    (row,) = prompts(path, **keys)
    assert (row.prompt, row.label, row.tools) == ([user("2 + 2?")], "4", [{"name": "add"}])
    assert row.metadata["reward_model"] == VERL["reward_model"]
    assert row.metadata["index"] == 1
    write([{"task": {"text": "2 + 2?", "pair": {"good": "4", "bad": "5"}, "by": 2}}], nested := tmp_path / f"n{suffix}")
    (row,) = prompts(nested, input_key="task.text", label_key="task.pair.good")
    assert (row.prompt, row.label) == ("2 + 2?", "4")


def test_of_a_name_with_a_dot_the_literal_one_wins(write_rows):
    path = write_rows([{"prompt": "a", "b.c": "literal", "b": {"c": "nested"}, "d.e": {"f": "half"}}])
    assert [prompts(path, label_key=key)[0].label for key in ("b.c", "d.e.f")] == ["literal", "half"]
    path = write_rows([{"prompt": "a", "b.c": None, "b": {"c": "nested"}}])
    with pytest.raises(DataError, match=r"the label 'b.c' is null"):
        prompts(path, label_key="b.c")


def test_every_key_of_a_held_out_set_may_be_nested(write_rows, tmp_path):
    from slime_rollout.data import check_prompt_data

    path = write_rows([{"a": {"q": "2?", "l": "4", "t": [{"name": "f"}], "m": {"x": 1}}}])
    keys = "input_key: a.q, label_key: a.l, tool_key: a.t, metadata_key: a.m"
    (tmp_path / "sets.yaml").write_text(f"eval: {{datasets: {{own: {{path: {path}, {keys}}}}}}}")
    train = write_rows([{"prompt": "a", "label": "1"}], "train.jsonl")
    given = {"hf_checkpoint": "none", "prompt_data": train, "rollout_batch_size": 1}
    assert check_prompt_data(RolloutConfig.of(**given, eval_config=str(tmp_path / "sets.yaml"))) == {train: 1, path: 1}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_field_that_is_null_is_said_to_be_null(write, tmp_path, suffix):
    path = tmp_path / f"p{suffix}"
    write(
        [
            {"prompt": "a", "label": "4", "answer": "1", "n": {"l": "2"}},
            {"prompt": "b", "answer": None, "n": {"l": None}},
        ],
        path,
    )
    for key in ("answer", "n.l"):
        with pytest.raises(DataError) as caught:
            prompts(path, label_key=key)
        assert f"the label {key!r} is null; " in str(caught.value)
    with pytest.raises(
        DataError, match=r"no label, which --rm-type exact compares with.*(; its 'label' is null|answer)"
    ):
        prompts(path)
    write([{"prompt": None, "label": "4"}, {"prompt": "a", "label": None}], path2 := tmp_path / f"q{suffix}")
    with pytest.raises(DataError, match=r"'prompt' must be a string or a list of chat messages, got null"):
        prompts(path2)
    write([{"prompt": "a", "chosen": "b", "rejected": None}, {"prompt": "a", "chosen": "b", "rejected": "c"}], path2)
    with pytest.raises(DataError, match=r"'rejected' must be a string or a list of chat messages, got null"):
        read_preferences(str(path2))


def test_a_message_advises_where_the_answer_is(write_rows):
    path = write_rows([VERL])
    with pytest.raises(
        DataError, match=r"name its field with --label-key, such as --label-key reward_model.ground_truth"
    ):
        prompts(path)
    with pytest.raises(DataError, match=r"no field 'ground_truth', .*; there is reward_model.ground_truth"):
        prompts(path, label_key="ground_truth")
    with pytest.raises(DataError, match=r"or name a field of it, such as reward_model.style"):
        prompts(path, label_key="reward_model")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_prompts_of_alpaca(write, tmp_path, suffix):
    path = tmp_path / f"p{suffix}"
    write(
        [
            {"instruction": "Add.", "input": "2 + 2", "output": "4"},
            {"instruction": "Add 2.", "input": "", "output": "5"},
        ],
        path,
    )
    rows = prompts(path, label_key="output")
    assert [(row.prompt, row.label) for row in rows] == [("Add.\n2 + 2", "4"), ("Add 2.", "5")]
    assert all("Alpaca" in row.said for row in rows)
    assert [row.prompt for row in prompts(path, label_key="output", input_key="instruction")] == ["Add.", "Add 2."]


def test_every_form_is_on_the_page():
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    for form in FORMS:
        needed = [*form.question, *([form.answer] if form.answer else [])]
        assert any(all(f"`{name}`" in line for name in needed) for line in page.splitlines()), form.said
