"""Rows in every format, and small tokenizers with chat templates.

The tokenizers are built as the families' published formats are: special tokens and turn order.

The templates' text is ours. What each family does that makes it hard is noted next to it.
"""

import bz2
import functools
import gzip
import json
import lzma
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slime_rollout.config import RolloutConfig
from slime_rollout.data import PromptEncoder, RowEncoder, load_tokenizer

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

datasets.disable_progress_bars()

# Past turns lose their reasoning, the last one always shows a think block, and tool answers share one user turn.
QWEN3 = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}Tools:
{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}
{%- if m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set content = m.content if m.content is string else '' %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set thought = '' %}
{%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{ content }}{% endif %}
{%- for call in m.tool_calls or [] %}
{%- if content or not loop.first %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}
{{- '\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""

# Contents are trimmed, a first token opens the text, tool answers are JSON, content of a tool call is dropped.
LLAMA3 = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n' }}
{%- for tool in tools or [] %}{{ tool | tojson + '\n\n' }}{% endfor %}
{{- system + '<|eot_id|>' }}
{%- for m in rest %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one tool call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson + '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# No token closes a turn: the next role's tag does. Past reasoning becomes an empty think block.
GLM4 = """[gMASK]<sop>
{%- if tools %}<|system|>
{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set content = m.content if m.content is string else '' %}
{%- if m.role in ('user', 'system') %}{{ '<|' + m.role + '|>\n' + content }}
{%- elif m.role == 'assistant' %}<|assistant|>
{%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
{%- if not thought and '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '\n<think>' + (thought.strip() if loop.index0 > ns.last else '') + '</think>' }}
{%- if content.strip() %}{{ '\n' + content.strip() }}{% endif %}
{%- for call in m.tool_calls or [] %}
{{- '\n<tool_call>' + call.function.name + '\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' }}
{{- (value if value is string else value | tojson) + '</arg_value>\n' }}{% endfor %}
{{- '</tool_call>' }}{% endfor %}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

# The generation prompt opens reasoning that past turns do not show; an answer to a tool has no header of its own.
DEEPSEEK = """{{- bos_token }}
{%- for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
{%- set ns = namespace(tool=false, user=false) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.tool = false %}{{ '<｜User｜>' + m.content + '<｜Assistant｜>' }}
{%- elif m.role == 'assistant' %}
{%- if ns.tool %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}
{%- set content = (m.content or '').split('</think>')[-1] %}
{{- content }}
{%- if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}
{%- for call in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}
{{- call.function.arguments | tojson + '\n```<｜tool▁call▁end｜>' }}{% endfor %}
{{- '<｜tool▁calls▁end｜>' }}{% endif %}
{{- '<｜end▁of▁sentence｜>' }}{% set ns.tool = false %}
{%- elif m.role == 'tool' %}
{%- if not ns.tool %}{{ '<｜tool▁outputs▁begin｜>' }}{% set ns.tool = true %}{% endif %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% endif %}{% endfor %}
{%- if ns.tool %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}
{%- if add_generation_prompt and not ns.tool %}{{ '<think>\n' }}{% endif %}"""

# Says itself what the model writes.
MARKED = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Per family: template, first and end token, further special tokens, tokens that are one token but no special one.
FAMILIES = {
    "qwen3": (QWEN3, None, "<|im_end|>", ["<|im_start|>"], ["<think>", "</think>", "<tool_call>", "</tool_call>"]),
    "llama3": (
        LLAMA3,
        "<|begin_of_text|>",
        "<|eot_id|>",
        ["<|start_header_id|>", "<|end_header_id|>"],
        [],
    ),
    "glm4": (
        GLM4,
        None,
        "<|endoftext|>",
        ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"],
    ),
    "deepseek": (
        DEEPSEEK,
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"],
        ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"],
    ),
    "marked": (MARKED, None, "<|im_end|>", ["<|im_start|>"], []),
}


def build(template, first, end, specials, plain):
    """A byte-level BPE tokenizer, trained on a little text, with the family's tokens and template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(["assistant\n\nuser\nthe weather is 42 degrees\n\n"] * 5, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        **({"bos_token": first} if first else {}),
        eos_token=end,
        additional_special_tokens=specials,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    return tokenizer


@pytest.fixture(scope="session")
def chat_tokenizers():
    """One tokenizer per family, by name."""
    return {name: build(*parts) for name, parts in FAMILIES.items()}


@pytest.fixture(scope="session")
def build_tokenizer():
    """Builds a ChatML tokenizer with a template of your own."""
    return lambda template: build(template, None, "<|im_end|>", ["<|im_start|>"], [])


@pytest.fixture(scope="session")
def write():
    """Writes rows in the format that the path's end names."""

    def write(rows, path):
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        if ".json." in f"{path.name}.":
            lines = json.dumps(rows, indent=len(rows) % 2 or None).encode()
        if path.name.endswith(".gz"):
            path.write_bytes(gzip.compress(lines, mtime=0))  # else no two files are the same
        elif path.name.endswith(".bz2"):
            path.write_bytes(bz2.compress(lines))
        elif path.name.endswith(".xz"):
            path.write_bytes(lzma.compress(lines))
        elif path.name.endswith(".zst"):
            path.write_bytes(zstd.compress(lines))
        elif path.suffix == ".parquet":
            pq.write_table(table_of(rows), path, row_group_size=2)
        elif path.suffix in (".jsonl", ".json"):
            path.write_bytes(lines)
        else:
            datasets.Dataset(table_of(rows)).save_to_disk(path)

    return write


def table_of(rows):
    columns = {key: None for row in rows for key in row}
    return pa.Table.from_pylist([{**columns, **row} for row in rows])


@pytest.fixture(scope="session")
def config_of(tokenizer_dir):
    """Settings with a tokenizer that is there."""
    return functools.partial(RolloutConfig.of, hf_checkpoint=tokenizer_dir, rollout_batch_size=1)


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir):
    """The tokenizer of `config_of`."""
    return load_tokenizer(tokenizer_dir)


@pytest.fixture(scope="session")
def encoder(config_of, tokenizer):
    """Tokenizes text."""
    return PromptEncoder.of(config_of(prompt_data="none"), tokenizer)


@pytest.fixture(scope="session")
def pool(config_of, encoder):
    """Two processes that tokenize."""
    pool = RowEncoder(config_of(prompt_data="none"), encoder, processes=2)
    yield pool
    pool.close()
