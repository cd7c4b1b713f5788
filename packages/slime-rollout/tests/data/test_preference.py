import json

import pytest

from slime_core.errors import DataError
from slime_rollout.data import PreferenceFields, read_preferences

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
            "'chosen' must be a string or chat messages, got an empty string",
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
def test_a_bad_line_is_named_with_its_number(write_rows, row, words):
    path = write_rows([{"prompt": "a", "chosen": "b", "rejected": "c"}, row])
    with pytest.raises(DataError) as caught:
        read_preferences(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert words in str(caught.value)
    assert json.dumps(str(caught.value)).count("\\n") == 0
