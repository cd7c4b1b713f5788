import json

import pytest

from slime_core.errors import DataError
from slime_rollout.data.messages import read_messages, text_or_messages

PARTS = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize(
    "content",
    [
        PARTS,
        ["2 + ", "2?"],
        [{"text": "2 + 2?"}],
        [{"type": "input_text", "text": "2 + 2?"}],
        [{"type": "output_text", "text": "2 + 2?", "annotations": []}],
        [{"type": "text", "text": "2 + 2?", "image_url": None}],  # as columns have it
    ],
)
def test_content_in_parts_of_text_is_their_text(role, content):
    assert read_messages("here", [{"role": role, "content": content}]) == [{"role": role, "content": "2 + 2?"}]
    assert read_messages("here", [{"from": role, "value": content}]) == [{"role": role, "content": "2 + 2?"}]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([*PARTS, {"type": "image"}], "part 3 of 'content' must be text, got a part of the type 'image'; only text"),
        (
            [{"type": "image_url", "image_url": {"url": "x"}}],
            "part 1 of 'content' must be text, got a part of the type",
        ),
        ([5], "part 1 of 'content' must be text, got a number"),
        ([{"type": "text", "text": 5}], "part 1 of 'content' must be text, got a part of the type 'text'"),
        ([], "needs 'content' as a string, got an empty list"),
    ],
)
def test_other_parts_are_named(content, words):
    with pytest.raises(DataError) as caught:
        read_messages("here", [{"role": "user", "content": "a"}, {"role": "user", "content": content}])
    assert str(caught.value).startswith("here, message 2")
    assert words in str(caught.value)


def test_a_prompt_in_parts_of_text_is_text_and_a_list_may_be_its_json():
    assert text_or_messages("here", PARTS) == "2 + 2?"
    messages = [{"role": "user", "content": "2 + 2?"}]
    assert read_messages("here", json.dumps(messages)) == messages
    with pytest.raises(DataError, match="must be a list of chat messages, got a string"):
        read_messages("here", "2 + 2?")


@pytest.mark.parametrize("several", [False, True])
def test_a_call_of_sharegpt_is_a_call(several):
    call = {"name": "add", "arguments": {"a": 2}}
    talk = [
        {"from": "human", "value": "2 + 2?"},
        {"from": "function_call", "value": json.dumps([call] * 2 if several else call)},
    ]
    talk += [{"from": "observation", "value": "4"}, {"from": "gpt", "value": "It is 4."}]
    _, asked, answer, said = read_messages("here", talk)
    calls = [{"type": "function", "function": call}] * (2 if several else 1)
    assert asked == {"role": "assistant", "content": None, "tool_calls": calls}
    assert (answer["role"], said) == ("tool", {"role": "assistant", "content": "It is 4."})


@pytest.mark.parametrize("text", ["add(2, 2)", "[]", "7", '{"a": 2}'])
def test_what_is_no_call_stays_the_text_that_it_is(text):
    assert read_messages("here", [{"from": "function_call", "value": text}]) == [{"role": "assistant", "content": text}]
