import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_rollout.data import ChatEncoder
from slime_rollout.data.chat import apply_template, unused_characters
from slime_rollout.data.left_out import EARLIER, THINKING, Lost, parts_left_out, rewrites_history

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "name": "Kari", "content": "How warm?"},
    {"role": "assistant", "content": "I look.", "reasoning_content": "look it up", "tool_calls": [CALL]},
    {"role": "tool", "content": "7"},
    {"role": "tool", "content": "8"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is 7."},
    {"role": "user", "content": "And the sea?"},
    {"role": "assistant", "content": "Also 7.", "reasoning_content": "the same"},
]
NAME, CALLS, ARGUMENTS = Lost("names", 1), Lost("tool calls", 2), Lost("arguments of tool calls", 2)
# As SmolLM2's: roles and contents alone.
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Writes all there is, and JSON in ASCII.
WHOLE = (
    "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.name }}\n{{ m.reasoning_content }}"
    "{{ m.content }}{{ m.tool_calls | tojson(ensure_ascii=true) if m.tool_calls }}<|im_end|>\n{% endfor %}"
)
# gpt-oss calls it thinking, and shows that of the last turn alone; a system message is refused elsewhere.
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.thinking if loop.last }}{{ m.content if m.role != 'system' }}<|im_end|>\n{% endfor %}"
)


def render_with(tokenizer, **how):
    return lambda messages, tools: str(apply_template(tokenizer, messages, tools, tokenize=False, **how))


LEFT_OUT = {
    "qwen3": {NAME, Lost(EARLIER, 2), Lost(EARLIER, 5)},
    "glm4": {NAME, Lost(EARLIER, 2), Lost(EARLIER, 5)},
    "deepseek": {NAME, Lost("tools", None), Lost(EARLIER, 2), Lost(EARLIER, 5), Lost(THINKING, 7)},
    "llama3": {NAME, Lost("words of the assistant", 2), Lost(EARLIER, 2), Lost(THINKING, 7)},
}


@pytest.mark.parametrize("family", LEFT_OUT)
def test_what_families_leave_out(chat_tokenizers, family):
    assert set(parts_left_out(render_with(chat_tokenizers[family]), CHAT, TOOLS)) == LEFT_OUT[family]


def test_a_template_of_roles_and_contents(build_tokenizer):
    lost = parts_left_out(render_with(build_tokenizer(PLAIN)), CHAT, TOOLS)
    assert set(lost) == {NAME, Lost("tools", None), CALLS, ARGUMENTS, Lost(EARLIER, 2), Lost(THINKING, 7)}


def test_a_template_that_writes_all(build_tokenizer):
    assert parts_left_out(render_with(build_tokenizer(WHOLE)), CHAT, TOOLS) == []


def test_fields_that_a_template_does_not_know(build_tokenizer):
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    render = render_with(build_tokenizer(THINKS))
    for field, lost in (
        ("thinking", []),
        ("reasoning", [Lost(THINKING, 2)]),
        ("reasoning_content", [Lost(THINKING, 2)]),
    ):
        with_field = [*chat[:2], {**chat[2], field: "hm"}]
        assert parts_left_out(render, with_field, None) == [Lost("the system message", 0), *lost]


def test_where_nothing_is_known_nothing_is_said(build_tokenizer):
    refuses = render_with(build_tokenizer("{{ raise_exception('no') }}"))
    assert parts_left_out(refuses, CHAT, TOOLS) == []
    assert not rewrites_history(refuses, CHAT, TOOLS)
    picky = render_with(
        build_tokenizer("{% if messages[1].content != 'How warm?' %}{{ raise_exception('no') }}{% endif %}")
    )
    assert parts_left_out(picky, CHAT, TOOLS) == []
    assert parts_left_out(picky, [{"role": "user", "content": " "}] * 2, None) == []


def test_a_mark_occurs_nowhere_else():
    """What a text holds is looked at, not how Python writes it: its escapes hide such characters."""
    assert unused_characters([{"content": "\ue000\ue001"}])[0] == "\ue002"


# A turn of the assistant, the tools that answer it, and what a user says then.
turns = st.lists(
    st.tuples(
        st.sampled_from(["plain", "reasoning", "think", "call"]),
        st.integers(1, 3),
        st.sampled_from(["7", "a b", "é漢"]),
    ),
    min_size=1,
    max_size=4,
)


def chat_of(turns):
    chat = [{"role": "user", "content": "q0"}]
    for place, (kind, answers, text) in enumerate(turns):
        message = {
            "role": "assistant",
            "content": f"<think>\nhm{place}\n</think>\n\n{text}" if kind == "think" else text,
        }
        if kind == "reasoning":
            message["reasoning_content"] = f"hm{place}"
        if kind == "call":
            chat += [message | {"tool_calls": [CALL]}, *({"role": "tool", "content": text} for _ in range(answers))]
        else:
            chat += [message, {"role": "user", "content": f"q{place}"}]
    return chat


@pytest.mark.parametrize("family", ["qwen3", "llama3", "glm4", "deepseek"])
@settings(max_examples=25, deadline=None)
@given(turns=turns, tools=st.sampled_from([None, TOOLS]))
def test_what_was_rendered_stays_or_is_said_to_change(chat_tokenizers, family, turns, tools):
    """With thinking and consecutive tool results: each prompt begins the next rendering, or it is reported."""
    tokenizer, chat = chat_tokenizers[family], chat_of(turns)
    while chat[-1]["role"] != "assistant":
        chat.pop()
    render = render_with(tokenizer)
    ends = [place + 1 for place, message in enumerate(chat) if message["role"] == "assistant"]
    texts = [render(chat[:end], tools) for end in ends]
    kept = all(after.startswith(before) for before, after in itertools.pairwise(texts))
    said = rewrites_history(render, chat, tools) or any(rewrites_history(render, chat[:end], tools) for end in ends)
    assert kept == (not said)
    encoded = ChatEncoder(tokenizer).encode(chat, tools=tools)
    spans = [sum(group) for group in runs_of(encoded.loss_mask)]
    assert sum(encoded.loss_mask) == sum(spans)
    assert len(spans) == len(ends)  # a run of trained tokens for each turn, and none for what tools and users say


def runs_of(mask):
    runs, run = [], []
    for entry in [*mask, 0]:
        if entry:
            run.append(entry)
        elif run:
            runs.append(run)
            run = []
    return runs
