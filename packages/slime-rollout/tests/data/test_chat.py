import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from slime_core.errors import ConfigError, DataError
from slime_core.hooks import HookArgs
from slime_rollout.data import PromptEncoder, load_tokenizer
from slime_rollout.data.chat import (
    ChatTurns,
    as_messages,
    template_tokenizer,
    text_tokens,
    with_checked_template,
)


@pytest.fixture
def tokenizer(tokenizer_dir):
    return load_tokenizer(tokenizer_dir)


def with_bos(tokenizer):
    """The same tokenizer, now putting <|start|> in front as Llama's does."""
    tokenizer.bos_token = "<|start|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 1)]
    )
    return tokenizer


def test_text_is_tokenized_as_the_tokenizer_does(tokenizer):
    encoder = PromptEncoder(tokenizer, apply_chat_template=False)
    tokens = encoder.encode("12 + 30 =")
    assert tokenizer.decode(tokens) == "12 + 30 ="
    assert tokens == tokenizer("12 + 30 =")["input_ids"]


def test_a_first_token_comes_once(tokenizer):
    encoder = PromptEncoder(with_bos(tokenizer), apply_chat_template=False)
    plain = encoder.encode("12 + 30 =")
    assert plain[0] == 1
    assert plain.count(1) == 1
    assert encoder.encode("<|start|>12 + 30 =") == plain


def test_the_template_renders_messages_and_text_alike(tokenizer):
    encoder = PromptEncoder(with_bos(tokenizer), apply_chat_template=True)
    tokens = encoder.encode([{"role": "user", "content": "2 + 2?"}])
    assert tokenizer.decode(tokens) == "<|start|>user:2 + 2?<|end|><|start|>assistant:"
    assert encoder.encode("2 + 2?") == tokens


def test_messages_without_the_template(tokenizer):
    with pytest.raises(DataError, match="add --apply-chat-template"):
        PromptEncoder(tokenizer, apply_chat_template=False).encode([{"role": "user", "content": "a"}])


def test_a_template_that_refuses_is_one_line(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles\n  must alternate') }}"
    with pytest.raises(DataError, match=r"^the chat template refuses the messages: roles must alternate$"):
        PromptEncoder(tokenizer, apply_chat_template=True).encode("a")


def test_the_template_gets_tools_and_further_arguments(tokenizer):
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}{{ messages[0].content }}"
        "{% if thinking is defined %}|{{ thinking }}{% endif %}{% if add_generation_prompt %}>{% endif %}"
    )
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    encoder = PromptEncoder(tokenizer, apply_chat_template=True)
    assert tokenizer.decode(encoder.encode("a")) == "a>"
    assert tokenizer.decode(encoder.encode("a", tools)) == "add;a>"
    changed = {"thinking": 5, "add_generation_prompt": False}
    encoder = PromptEncoder(tokenizer, apply_chat_template=True, template_kwargs=changed)
    assert tokenizer.decode(encoder.encode("a", tools)) == "add;a|5"


def test_no_template_to_apply(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="has no chat template; leave the flag out"):
        PromptEncoder(tokenizer, apply_chat_template=True)


def test_no_directory():
    with pytest.raises(ConfigError, match=r"some/model is not a directory; give a model's"):
        load_tokenizer("some/model")


@pytest.mark.parametrize("broken", [None, "{", '{"model": 5}'])
def test_a_directory_without_a_tokenizer(tmp_path, broken):
    if broken is not None:
        (tmp_path / "tokenizer.json").write_text(broken)
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ConfigError, match="has no tokenizer that transformers can load") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.real
@pytest.mark.timeout(180)
def test_a_torchvision_that_cannot_be_imported_does_not_matter(engine_python, tokenizer_dir, tmp_path):
    """As in an engine environment on a CPU, which has the CUDA build of torchvision."""
    shutil.copy(Path(tokenizer_dir) / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # for which transformers imports torchvision
    code = "import sys; from slime_rollout.data.chat import load_tokenizer; print(len(load_tokenizer(sys.argv[1])))"
    result = subprocess.run(
        [engine_python, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=150, check=False
    )
    assert result.stdout.split()[-1:] == [str(len(load_tokenizer(str(tmp_path))))], result.stderr


def test_a_transformers_that_lacks_something_is_not_blamed_on_the_model(tokenizer_dir, monkeypatch):
    def missing(path, **how):
        raise ImportError("no protobuf")

    for name in ("AutoTokenizer", "PreTrainedTokenizerFast"):
        monkeypatch.setattr(f"transformers.{name}.from_pretrained", missing)
    with pytest.raises(ConfigError, match=r"transformers in .* is incomplete: no protobuf"):
        load_tokenizer(tokenizer_dir)


OWN_TOKENIZER = '''
from transformers import PreTrainedTokenizer


class Letters(PreTrainedTokenizer):
    """A token for each letter of `tiktoken.model`."""

    vocab_files_names = {"vocab_file": "tiktoken.model"}

    def __init__(self, vocab_file, **kwargs):
        self.letters = open(vocab_file, encoding="utf-8").read()
        super().__init__(**kwargs)

    vocab_size = property(lambda self: len(self.letters))

    def get_vocab(self):
        return {letter: token for token, letter in enumerate(self.letters)}

    def _tokenize(self, text, **kwargs):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.letters.index(token)

    def _convert_id_to_token(self, index):
        return self.letters[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)
'''


def test_a_tokenizer_that_is_code_runs_only_if_it_is_trusted(tmp_path, monkeypatch):
    """As those of Kimi and Moonlight are published: Python beside `tiktoken.model`."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "deepseek_v3"}')
    (model / "tiktoken.model").write_text("abc ")
    (model / "tokenization_own.py").write_text(OWN_TOKENIZER)
    config = {"auto_map": {"AutoTokenizer": ["tokenization_own.Letters", None]}, "tokenizer_class": "Letters"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="is Python code of its own; read it, and give --trust-remote-code"):
        load_tokenizer(str(model))
    assert text_tokens(load_tokenizer(str(model), trust_remote_code=True), "cab a") == [2, 0, 1, 3, 0]


ASKED = [{"role": "user", "content": "How warm?"}]
TOOL = [{"role": "tool", "content": "7"}]
USER = [{"role": "user", "content": "Sure?"}]

# By family and what follows: what the model's turn ends with, and what comes after it.
CASES = {
    ("qwen3", "tool"): (
        "<|im_end|>",
        "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    ("qwen3", "user"): ("<|im_end|>", "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"),
    ("llama3", "tool"): (
        "<|eot_id|>",
        '<|start_header_id|>ipython<|end_header_id|>\n\n"7"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
    ),
    ("llama3", "user"): (
        "<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nSure?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    ("glm4", "tool"): ("<|observation|>", "\n<tool_response>\n7\n</tool_response><|assistant|>"),
    ("glm4", "user"): ("<|user|>", "\nSure?<|assistant|>"),
    ("deepseek", "tool"): (
        "<｜end▁of▁sentence｜>",
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>7<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
    ),
    ("deepseek", "user"): ("<｜end▁of▁sentence｜>", "<｜User｜>Sure?<｜Assistant｜><think>\n"),
    ("marked", "user"): ("<|im_end|>", "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"),
}


@pytest.mark.parametrize(("family", "follows"), CASES, ids=" ".join)
def test_a_chat_goes_on(chat_tokenizers, family, follows):
    tokenizer, (end, text) = chat_tokenizers[family], CASES[family, follows]
    turns, messages = ChatTurns(tokenizer, HookArgs({})), TOOL if follows == "tool" else USER
    end_token = tokenizer.convert_tokens_to_ids(end)
    assert tokenizer.decode(turns.continuation(ASKED, messages, last_token=end_token)) == text
    # A turn that was cut off is closed first.
    other = tokenizer.encode("x", add_special_tokens=False)[-1]
    assert tokenizer.decode(turns.continuation(ASKED, messages, last_token=other)) == end + text
    assert tokenizer.decode(turns.continuation(ASKED, messages, last_token=None)) == end + text


@pytest.mark.parametrize("family", ["qwen3", "llama3", "glm4", "deepseek"])
def test_consecutive_tool_results_and_thinking_leave_what_was_sampled_alone(chat_tokenizers, family):
    """What stood before stays, each turn is written once, by the model, and only then the next one begins."""
    tokenizer = chat_tokenizers[family]
    turns, results = ChatTurns(tokenizer, HookArgs({})), [{"role": "tool", "content": text} for text in ("7", "8")]
    tokens, mask = turns.prompt(ASKED, None), []
    mask += [0] * len(tokens)
    for said in ("<think>\nhm\n</think>\n\nI look.", "<think>\nso\n</think>\n\nI look again."):
        sampled = tokenizer.encode(said, add_special_tokens=False)
        new = turns.continuation(ASKED, results, last_token=sampled[-1])
        text = tokenizer.decode(new)
        assert text.index("7") < text.index("8")
        begin = {"qwen3": "<|im_start|>assistant", "glm4": "<|assistant|>", "llama3": "assistant<|end_header_id|>"}
        assert text.count(begin[family]) == 1 if family in begin else not text.count("<｜Assistant｜>")
        tokens, mask = [*tokens, *sampled, *new], [*mask, *[1] * len(sampled), *[0] * len(new)]
    kept = tokenizer.decode([token for token, one in zip(tokens, mask, strict=True) if one])
    assert kept == "<think>\nhm\n</think>\n\nI look.<think>\nso\n</think>\n\nI look again."


@pytest.mark.parametrize("family", ["llama3", "marked"])
def test_with_a_template_that_leaves_past_turns_alone_it_is_the_rendering(chat_tokenizers, family):
    tokenizer = chat_tokenizers[family]
    turns = ChatTurns(tokenizer, HookArgs({}))
    messages, text = list(ASKED), tokenizer.decode(turns.prompt(ASKED, None))
    for said, asked in (("7", "Sure?"), ("Yes.", "Really?")):
        new = [{"role": "user", "content": asked}]
        text += said + tokenizer.decode(turns.continuation(messages, new, last_token=None))
        messages += [{"role": "assistant", "content": said}, *new]
    assert text == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_the_template_gets_its_arguments(chat_tokenizers):
    tokenizer = chat_tokenizers["qwen3"]
    turns = ChatTurns(tokenizer, HookArgs({"apply_chat_template_kwargs": '{"enable_thinking": false}'}))
    assert tokenizer.decode(turns.prompt(ASKED, None)).endswith("assistant\n<think>\n\n</think>\n\n")
    assert tokenizer.decode(turns.continuation(ASKED, USER, last_token=None)).endswith("<think>\n\n</think>\n\n")
    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert "weather" in tokenizer.decode(turns.prompt(ASKED, tools))


def test_what_a_token_would_only_happen_to_repeat_is_written(build_tokenizer):
    """Where no special token ends a turn, the model's last token does not mean that one is left out."""
    tokenizer = build_tokenizer("{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}assistant:")
    newline = tokenizer.encode("\n", add_special_tokens=False)[-1]
    turns = ChatTurns(tokenizer, HookArgs({}))
    assert tokenizer.decode(turns.continuation(ASKED, USER, last_token=newline)) == "\nuser:Sure?\nassistant:"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].content }}", "writes what the model said 0 times when 1 messages follow"),
        ("{% for m in messages %}{{ m.content + m.content }}{% endfor %}", "writes what the model said 2 times"),
        ("{{ raise_exception('no\ntools') }}", r"the chat template refuses the messages: no tools"),
    ],
)
def test_a_template_that_a_chat_cannot_go_on_with(build_tokenizer, template, message):
    with pytest.raises(DataError, match=message) as caught:
        ChatTurns(build_tokenizer(template), HookArgs({})).continuation(ASKED, USER, last_token=None)
    assert "\n" not in str(caught.value)


def test_without_a_template(build_tokenizer):
    turns = ChatTurns(build_tokenizer(None), HookArgs({}))
    for ask in (lambda: turns.prompt(ASKED, None), lambda: turns.continuation(ASKED, USER, last_token=None)):
        with pytest.raises(DataError, match="has no chat template, so messages cannot be written"):
            ask()


def test_text_is_a_message_of_the_users():
    assert as_messages("How warm?") == ASKED
    assert as_messages(ASKED) == ASKED and as_messages(ASKED) is not ASKED


PLAIN = """
import sys
from slime_rollout.data import load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
assert "torch" not in sys.modules, "torch was imported"
from transformers import AutoTokenizer
other = AutoTokenizer.from_pretrained(sys.argv[1])
assert type(tokenizer) is type(other), (type(tokenizer), type(other))
assert tokenizer.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
assert tokenizer.special_tokens_map == other.special_tokens_map
assert tokenizer.chat_template == other.chat_template
assert tokenizer.model_max_length == other.model_max_length
"""


@pytest.mark.parametrize("name", ["TokenizersBackend", pytest.param("PreTrainedTokenizerFast", marks=pytest.mark.full)])
def test_a_plain_tokenizer_is_what_transformers_chooses_without_torch(name, tokenizer_dir, tmp_path):
    for file in Path(tokenizer_dir).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_bytes()) if path.exists() else {}
    path.write_text(json.dumps({**config, "tokenizer_class": name}))
    words = [sys.executable, "-c", PLAIN, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


BOMBS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10**11 }}",
    "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='xx') %}{% for i in range(22) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("template", BOMBS, ids=["time", "memory at once", "memory", "characters"])
def test_a_template_without_an_end_is_refused(tokenizer, template):
    tokenizer.chat_template = template
    with pytest.raises(
        ConfigError, match=r"the chat template of .* takes more than 2 s of computing, 512 MiB or 1,000"
    ):
        with_checked_template(tokenizer)
    tokenizer.chat_template = {"default": "a", "tools": template}
    with pytest.raises(ConfigError, match="takes more than"):
        with_checked_template(tokenizer)


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ raise_exception('no') }}", "{% for", None])
def test_a_template_that_ends_is_used_whatever_it_says(tokenizer, template):
    tokenizer.chat_template = template
    assert with_checked_template(tokenizer) is tokenizer


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "tokenizer.json"])
def test_files_of_a_tokenizer_are_regular_and_of_a_size(tokenizer_dir, tmp_path, name):
    model = Path(shutil.copytree(tokenizer_dir, tmp_path / "model"))
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    for load in (load_tokenizer, template_tokenizer):
        with pytest.raises(ConfigError, match=f"{name} is not a regular file"):
            load(str(model))
    (model / name).unlink()
    (model / name).touch()
    os.truncate(model / name, 2**40)
    with pytest.raises(ConfigError, match=f"{name} has 1,099,511,627,776 bytes; at most"):
        load_tokenizer(str(model))
    (model / name).unlink()
    (model / name).symlink_to(name)
    with pytest.raises(ConfigError, match=f"{name} cannot be read"):
        load_tokenizer(str(model))


@pytest.mark.timeout(60)
def test_a_pipe_of_any_name_is_refused_and_a_link_to_nothing_is_not(tokenizer_dir, tmp_path):
    model = Path(shutil.copytree(tokenizer_dir, tmp_path / "model"))
    (model / "gone").symlink_to("nowhere")
    load_tokenizer(str(model))
    os.mkfifo(model / "merges")
    with pytest.raises(ConfigError, match="merges is not a regular file"):
        load_tokenizer(str(model))


@pytest.mark.parametrize(
    "value", ['{"a":' * 100_000, json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": []})]
)
def test_settings_that_no_tokenizer_has_are_named(tokenizer_dir, tmp_path, value):
    model = Path(shutil.copytree(tokenizer_dir, tmp_path / "model"))
    (model / "tokenizer_config.json").write_text(value)
    with pytest.raises((ConfigError, DataError), match=r"has no tokenizer that|the tokenizer of .* fails"):
        PromptEncoder(load_tokenizer(str(model)), apply_chat_template=False).encode("a")
