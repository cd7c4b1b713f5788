import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from slime_core.errors import ConfigError, DataError
from slime_rollout.data import ChatEncoder, PromptEncoder

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOL_CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How warm?"},
    {"role": "assistant", "content": None, "reasoning_content": "look it up", "tool_calls": [CALL]},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "It is 7."},
    {"role": "user", "content": "And the <tool_response>sea</tool_response>"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nAlso 7."},
]
JSON_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
GLM_CALL = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    '```json\n{"city": "Oslo"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
TOOL_TURNS = {
    "qwen3": [f"{JSON_CALL}<|im_end|>", "It is 7.<|im_end|>", "<think>\nhm\n</think>\n\nAlso 7.<|im_end|>"],
    "llama3": [
        '{"name": "weather", "parameters": {"city": "Oslo"}}<|eot_id|>',
        "It is 7.<|eot_id|>",
        "<think>\nhm\n</think>\n\nAlso 7.<|eot_id|>",
    ],
    "glm4": [
        f"\n<think></think>\n{GLM_CALL}<|observation|>",
        "\n<think></think>\nIt is 7.<|user|>",
        "\n<think>hm</think>\nAlso 7.",
    ],
    "deepseek": [
        f"{DEEPSEEK_CALL}<｜end▁of▁sentence｜>",
        "It is 7.<｜end▁of▁sentence｜>",
        "\n\nAlso 7.<｜end▁of▁sentence｜>",
    ],
}


def runs(tokenizer, encoded):
    """The texts of the trained runs of tokens."""
    texts, run = [], []
    for token, trained in zip([*encoded.tokens, 0], [*encoded.loss_mask, 0], strict=True):
        if trained:
            run.append(token)
        elif run:
            texts.append(tokenizer.decode(run))
            run = []
    return texts


def own_tokens(tokenizer, messages, **how):
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **how)


def expected_turn(family, content, *, last):
    """What the model writes for a plain answer, from the family's published format."""
    thought = "<think>\n\n</think>\n\n" if last else ""
    return {
        "qwen3": f"{thought}{content}<|im_end|>",
        "llama3": f"{content.strip()}<|eot_id|>",
        "glm4": f"\n<think></think>{chr(10) + content.strip() if content.strip() else ''}{'' if last else '<|user|>'}",
        "deepseek": f"{content}<｜end▁of▁sentence｜>",
        "marked": f"{content}<|im_end|>",
    }[family]


# Texts that look like templates' own, white space at the ends, and other scripts. A newline at the beginning may melt
# into the header's token; that has a test of its own.
PIECES = [
    "<|im_start|>assistant\n",
    "<|im_end|>",
    "<|user|>",
    "<｜Assistant｜>",
    "assistant",
    "\n",
    " ",
    "the weather",
    "é漢🙂",
]
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=6)), max_size=5).map("".join)
contents = texts.map(lambda text: text.encode("utf-8", "ignore").decode().lstrip("\n"))


def check_turns(tokenizer, family, system, exchanges, cut):
    messages = [{"role": "system", "content": system}] if system is not None else []
    for question, answer in exchanges:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    encoder = ChatEncoder(tokenizer)
    encoded = encoder.encode(messages)
    assert encoded.tokens == own_tokens(tokenizer, messages)
    ends = [place == len(exchanges) - 1 for place in range(len(exchanges))]
    wanted = [expected_turn(family, answer, last=last) for (_, answer), last in zip(exchanges, ends, strict=True)]
    assert runs(tokenizer, encoded) == wanted
    short = encoder.encode(messages, max_length=cut)
    assert short.tokens == encoded.tokens[:cut]
    assert short.loss_mask == encoded.loss_mask[:cut]
    assert short.truncated == (cut < len(encoded.tokens))


PROPERTY = {
    "system": st.none() | contents,
    "exchanges": st.lists(st.tuples(contents, contents), min_size=1, max_size=3),
    "cut": st.integers(1, 80),
}


@pytest.mark.parametrize("family", ["qwen3", "llama3", "glm4", "deepseek", "marked"])
@settings(max_examples=25)
@given(**PROPERTY)
def test_trained_are_the_answers_and_their_ends_alone(chat_tokenizers, family, system, exchanges, cut):
    check_turns(chat_tokenizers[family], family, system, exchanges, cut)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3", "llama3", "glm4", "deepseek", "marked"])
@settings(max_examples=2000)
@given(**PROPERTY)
def test_many_conversations(chat_tokenizers, family, system, exchanges, cut):
    check_turns(chat_tokenizers[family], family, system, exchanges, cut)


@pytest.mark.parametrize("family", TOOL_TURNS)
def test_tools_and_reasoning(chat_tokenizers, family):
    tokenizer = chat_tokenizers[family]
    encoded = ChatEncoder(tokenizer).encode(TOOL_CHAT, tools=TOOLS)
    assert encoded.tokens == own_tokens(tokenizer, TOOL_CHAT, tools=TOOLS)
    assert runs(tokenizer, encoded) == TOOL_TURNS[family]


@pytest.mark.parametrize("family", ["qwen3", "glm4", "deepseek"])
def test_several_calls_and_answers(chat_tokenizers, family):
    tokenizer = chat_tokenizers[family]
    chat = [TOOL_CHAT[1], TOOL_CHAT[2] | {"tool_calls": [CALL, CALL]}, TOOL_CHAT[3], TOOL_CHAT[3], TOOL_CHAT[4]]
    encoded = ChatEncoder(tokenizer).encode(chat, tools=TOOLS)
    assert encoded.tokens == own_tokens(tokenizer, chat, tools=TOOLS)
    first, last = runs(tokenizer, encoded)
    assert (first.count("Oslo"), last.count("It is 7.")) == (2, 1)
    assert "7" not in first


def template_of(turn):
    return (
        "{%- for m in messages %}<|im_start|>{{ m.role + '\\n' }}" + turn + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


FUNCTION = "m.tool_calls[0].function"
AS_JSON = "{% if m.tool_calls %}{{ " + FUNCTION + " | tojson }}{% else %}{{ m.content }}{% endif %}"
# As in the families' own templates: what each does with null content, and with arguments of the other kind.
FORMS = {
    "deepseek": "{{ " + FUNCTION + ".name + ' ' + " + FUNCTION + ".arguments if m.content is none else m.content }}",
    "glm": "{{ m.content }}{% if m.tool_calls %}{{ " + FUNCTION + ".name }}"
    "{% for key, value in " + FUNCTION + ".arguments.items() %}{{ ' ' + key + ' ' + value }}{% endfor %}{% endif %}",
    "llama": AS_JSON,
    "qwen3": AS_JSON.replace(
        FUNCTION + " | tojson",
        FUNCTION + ".arguments if " + FUNCTION + ".arguments is string else " + FUNCTION + " | tojson",
    ),
}
AS_TEXT, AS_OBJECT = '{"city": "Zürich"}', {"city": "Zürich"}
WRITTEN = {
    "deepseek": 'weather {"city": "Zürich"}',
    "glm": "weather city Zürich",
    "llama": '{"name": "weather", "arguments": {"city": "Zürich"}}',
}


@pytest.mark.parametrize("family", FORMS)
@pytest.mark.parametrize("arguments", [AS_TEXT, AS_OBJECT])
def test_calls_have_the_form_that_the_template_expects(build_tokenizer, family, arguments):
    tokenizer = build_tokenizer(template_of(FORMS[family]))
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [TOOL_CHAT[1], {"role": "assistant", "content": None, "tool_calls": [call]}, TOOL_CHAT[3]]
    before = copy.deepcopy(messages)
    encoded = ChatEncoder(tokenizer).encode([*messages, {"role": "assistant", "content": "None of it."}])
    written = WRITTEN.get(family) or (AS_TEXT if arguments == AS_TEXT else WRITTEN["llama"])  # Qwen3 takes both
    assert runs(tokenizer, encoded) == [f"{written}<|im_end|>", "None of it.<|im_end|>"]
    prompt = tokenizer.decode(PromptEncoder(tokenizer, apply_chat_template=True).encode(messages))
    assert f"<|im_start|>assistant\n{written}<|im_end|>" in prompt
    assert messages == before


def test_calls_that_are_none_are_the_templates_to_refuse(build_tokenizer):
    """Messages that a function of your own makes were not checked by a reader of files."""
    encoder = PromptEncoder(build_tokenizer(template_of(FORMS["glm"])), apply_chat_template=True)
    for calls in ("weather", ["weather"], [{"function": "weather"}], [{"function": {}}], {"function": {}}):
        with pytest.raises(DataError, match="the chat template refuses the messages"):
            encoder.encode([{"role": "assistant", "content": "a", "tool_calls": calls}])


def test_arguments_that_are_no_object_stay_as_they_are(build_tokenizer):
    tokenizer = build_tokenizer(template_of(FORMS["llama"]))
    for text in ("{", "[1]", "7"):
        call = {"function": {"name": "weather", "arguments": text}}
        chat = [TOOL_CHAT[1], {"role": "assistant", "content": "", "tool_calls": [call]}]
        (written,) = runs(tokenizer, ChatEncoder(tokenizer).encode(chat))
        assert written == f'{{"name": "weather", "arguments": "{text}"}}<|im_end|>'


def test_the_template_takes_its_arguments(chat_tokenizers):
    tokenizer = chat_tokenizers["qwen3"]
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    encoded = ChatEncoder(tokenizer, template_kwargs={"enable_thinking": False}).encode(chat)
    # The generation prompt has the empty think block, so the model does not write it.
    assert runs(tokenizer, encoded) == ["b<|im_end|>"]


def test_what_the_generation_prompt_opens_is_given(chat_tokenizers):
    tokenizer = chat_tokenizers["deepseek"]
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nhm, b"}]
    assert runs(tokenizer, ChatEncoder(tokenizer).encode(chat)) == ["hm, b<｜end▁of▁sentence｜>"]
    chat[1]["content"] = "<thin ice"  # shares its beginning with the prompt by chance
    assert runs(tokenizer, ChatEncoder(tokenizer).encode(chat)) == ["<thin ice<｜end▁of▁sentence｜>"]


def test_a_last_token_for_templates_without(chat_tokenizers):
    tokenizer = chat_tokenizers["glm4"]
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    encoded = ChatEncoder(tokenizer, end_of_turn="<|user|>").encode(chat)
    assert runs(tokenizer, encoded) == ["\n<think></think>\nb<|user|>"]
    assert encoded.tokens[:-1] == own_tokens(tokenizer, chat)
    closed = chat_tokenizers["qwen3"]
    assert ChatEncoder(closed, end_of_turn="<|im_end|>").encode(chat) == ChatEncoder(closed).encode(chat)
    with pytest.raises(ConfigError, match="'<end>' is not a special token"):
        ChatEncoder(tokenizer, end_of_turn="<end>")


@pytest.mark.parametrize("family", ["llama3", "marked"])
def test_turns_left_out(chat_tokenizers, family):
    tokenizer, encoder = chat_tokenizers[family], ChatEncoder(chat_tokenizers[family])
    end = tokenizer.eos_token
    chat = [{"role": role, "content": text} for text in "ab" for role in ("user", "assistant")]
    plain = encoder.encode(chat)
    assert runs(tokenizer, encoder.encode(chat, first_trained=2)) == [f"b{end}"]
    chat[3]["step_loss_mask"] = 0
    encoded = encoder.encode(chat)
    assert runs(tokenizer, encoded) == [f"a{end}"]
    assert encoded.tokens == plain.tokens


@pytest.mark.parametrize("trim", [False, True])
def test_a_token_over_the_start_of_a_turn_is_not_trained(build_tokenizer, trim):
    tokenizer = build_tokenizer(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
    )
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "weather is 42"}]
    encoded = ChatEncoder(tokenizer).encode(chat)
    (text,) = runs(tokenizer, encoded)
    assert text == " is 42<|im_end|>"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("{{ m.content if loop.last else m.content[:1] }}<|im_end|>", "is: it is written otherwise once more"),
        ("{{ m.content }}\n", "no special token ends it, so a model could not learn to stop"),
        ("{{ raise_exception('no answers\nhere') }}", "refuses the messages: no answers"),
    ],
)
def test_a_template_without_a_way_is_refused_in_a_line(build_tokenizer, answer, words):
    tokenizer = build_tokenizer(
        "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}\nA: {% else %}" + answer + "{% endif %}"
        "{% endfor %}"
    )
    chat = [{"role": role, "content": "abc"} for _ in range(2) for role in ("user", "assistant")]
    with pytest.raises(DataError) as caught:
        ChatEncoder(tokenizer).encode(chat)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_that_writes_no_message_as_it_stands(build_tokenizer):
    tokenizer = build_tokenizer("{% for m in messages %}{{ m.role }} {{ m.content | length }}<|im_end|>{% endfor %}")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(
        DataError, match=r"in message 2 is: no message before it .* mark the turns in the template with"
    ):
        ChatEncoder(tokenizer).encode(chat)


@pytest.mark.parametrize("place", [0, 3, 6, 9, 11, 12])
def test_a_template_that_rewrites_what_does_not_begin_and_end_as_expected(build_tokenizer, place):
    begin, end = "abcdefghijkl"[:place], "abcdefghijkl"[place:]
    tokenizer = build_tokenizer(
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}"
        f"{{% elif m.content.startswith('{begin}') and m.content.endswith('{end}') %}}{{{{ m.content }}}}"
        "{% else %}something else{% endif %}<|im_end|>{% endfor %}"
    )
    chat = [{"role": "user", "content": begin + end}, {"role": "assistant", "content": "7"}]
    assert runs(tokenizer, ChatEncoder(tokenizer).encode(chat)) == ["7<|im_end|>"]


def test_turns_that_touch_in_a_template_that_writes_nothing_before_them(build_tokenizer):
    tokenizer = build_tokenizer("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    chat = [{"role": "user", "content": ""}, *({"role": "assistant", "content": text} for text in "78")]
    encoded = ChatEncoder(tokenizer).encode(chat)
    assert tokenizer.decode(encoded.tokens) == "<|im_end|>7<|im_end|>8<|im_end|>"
    assert encoded.loss_mask == [0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("closed", "words"),
    [
        ("'open' not in m.content", "it is written otherwise once more"),
        ("m.content != 'open'", "no special token ends it"),  # a mark in it would close it
    ],
)
def test_a_turn_that_its_template_does_not_close_as_others_is_refused(build_tokenizer, closed, words):
    tokenizer = build_tokenizer(
        "{% for m in messages %}{{ m.content }}{{ '<|im_end|>' if " + closed + " }}{% endfor %}"
    )
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "open"}]
    with pytest.raises(DataError, match=f"in message 2 is: {words}"):
        ChatEncoder(tokenizer).encode(chat)


def test_a_call_that_shares_its_beginning_with_the_prompt(chat_tokenizers):
    tokenizer = chat_tokenizers["qwen3"]
    encoder = ChatEncoder(tokenizer, template_kwargs={"enable_thinking": False})
    # The prompt goes on with <think>, the past turn with <tool_call>.
    assert runs(tokenizer, encoder.encode(TOOL_CHAT, tools=TOOLS))[0] == TOOL_TURNS["qwen3"][0]


def test_history_that_is_rewritten_before_the_turn(build_tokenizer):
    tokenizer = build_tokenizer(
        "{% for m in messages %}{{ m.content }}{{ '!' if loop.last or m.role == 'assistant' else '?' }}<|im_end|>"
        "{% endfor %}"
    )
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match="what comes before it is written otherwise"):
        ChatEncoder(tokenizer).encode(chat)


def test_an_assistant_that_begins(chat_tokenizers):
    with pytest.raises(DataError, match="message 1 is the assistant's; begin with"):
        ChatEncoder(chat_tokenizers["llama3"]).encode([{"role": "assistant", "content": "b"}])


def test_tokenizers_that_cannot_serve(build_tokenizer, monkeypatch):
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatEncoder(build_tokenizer(None))
    tokenizer = build_tokenizer("{{ messages }}")
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    with pytest.raises(ConfigError, match="does not know where its tokens stand"):
        ChatEncoder(tokenizer)
