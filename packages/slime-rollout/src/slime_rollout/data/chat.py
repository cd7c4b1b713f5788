"""Prompts and the next turns of a chat to token ids, with the model's own tokenizer and chat template."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import resource
import signal
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from slime_core.errors import ConfigError, DataError
from slime_core.files import read_json
from slime_core.hooks import HookArgs
from slime_core.types import Message, Prompt
from slime_rollout.config import RolloutConfig

# Words, numbers, code and several scripts: two tokenizers hardly cut all of it alike.
_PROBE = (
    "The quick brown fox, 1234567890 + 3.14159 =\n\tdef f(x): return x**2  # naïve café 北京 Москва 🙂 <|im_start|>"
)
_PRIVATE_USE = range(0xE000, 0xF8FF)

Tools = list[dict[str, Any]] | None
Rendering = Callable[[list[Message]], str]
"""A template. Raises DataError where it refuses the messages."""


STRUCTURE = Path(__file__).parents[1] / "engine" / "cpu_shims" / "slime_cpu_shims" / "structure.py"
_MOST_BYTES = {".json": 2**28, ".model": 2**28, ".tiktoken": 2**28, ".txt": 2**28, ".py": 2**28, ".jinja": 2**20}
"""Of the files that a tokenizer may be read from."""
_TEMPLATE_SECONDS, _TEMPLATE_WAIT, _TEMPLATE_BYTES, _TEMPLATE_CHARACTERS = 2, 60, 2**29, 10**6
_TRIED = [{"role": role, "content": "1 + 1"} for role in ("user", "assistant", "user")]
PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes of tokenizers that consist of a tokenizer.json alone: two names of one."""


def load_tokenizer(hf_checkpoint: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a Hugging Face directory; ``trust_remote_code`` runs one that comes as Python (Kimi, Moonlight).

    Raises `ConfigError` if there is none that transformers can load, or something in the directory is not read: a pipe,
    a device, a text of gigabytes.
    """
    if not Path(hf_checkpoint).is_dir():
        raise ConfigError(
            f"--hf-checkpoint {hf_checkpoint} is not a directory; give a model's, with tokenizer.json in it"
        )
    check_files(Path(hf_checkpoint))
    if not trust_remote_code and _is_code(Path(hf_checkpoint)):
        raise ConfigError(
            f"the tokenizer of --hf-checkpoint {hf_checkpoint} is Python code of its own; read it, and give "
            "--trust-remote-code to run it, or put a tokenizer.json in its place"
        )
    _ignore_broken_torchvision()
    remember_structure()
    try:
        if _is_plain(Path(hf_checkpoint)):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(hf_checkpoint)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(hf_checkpoint, trust_remote_code=trust_remote_code)
    except ImportError as error:
        raise ConfigError(
            f"transformers in {sys.executable} is incomplete: {' '.join(str(error.__cause__ or error).split())}"
        ) from error
    except Exception as error:  # whatever the many tokenizer classes raise for a broken file
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"--hf-checkpoint {hf_checkpoint} has no tokenizer that transformers can load ({reason}); "
            "give a directory with tokenizer.json"
        ) from error


def check_files(directory: Path) -> None:
    """Raise `ConfigError` if a file that a tokenizer may be read from is too large, or none, such as a pipe."""
    for path in directory.iterdir() if directory.is_dir() else ():
        try:
            state = path.stat()
        except FileNotFoundError:  # a link to nothing
            continue
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}); get the model again") from None
        if stat.S_ISDIR(state.st_mode):
            continue
        if not stat.S_ISREG(state.st_mode):
            raise ConfigError(f"{path} is not a regular file, so {directory} is not read; get the model again")
        most = _MOST_BYTES.get(path.suffix)
        if most is not None and state.st_size > most:
            raise ConfigError(f"{path} has {state.st_size:,} bytes; at most {most:,} are read; get the model again")


def _is_plain(directory: Path) -> bool:
    """Whether its tokenizer.json says it all: `AutoTokenizer` makes the same of it, but imports torch first."""
    try:
        config = read_json(directory / "tokenizer_config.json")
    except (OSError, ValueError, DataError):
        return False
    plain = isinstance(config, dict) and config.get("tokenizer_class") in PLAIN and "auto_map" not in config
    return plain and (directory / "tokenizer.json").is_file()


def _is_code(directory: Path) -> bool:
    """Whether only the directory's own code can read its tokenizer; transformers would guess at one without it."""
    try:
        named = read_json(directory / "tokenizer_config.json")["auto_map"]["AutoTokenizer"]
    except (OSError, ValueError, LookupError, TypeError, DataError):
        return False
    return bool(named) and not (directory / "tokenizer.json").is_file()


@functools.cache
def remember_structure() -> None:
    """Have transformers, once it is imported, remember what it finds in its files, as engines do."""
    if "transformers" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location("slime_transformers_structure", STRUCTURE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.meta_path.insert(0, module.Remember())


def _ignore_broken_torchvision() -> None:
    """Treat a torchvision that cannot be imported as not installed; transformers would fail on it even for text.

    An engine environment on a CPU has such a pair: torchvision's CUDA build beside torch's CPU build.
    """
    if importlib.util.find_spec("torchvision") is not None:
        try:
            importlib.import_module("torchvision")
        except Exception:  # RuntimeError: operator torchvision::nms does not exist
            sys.modules["torchvision"] = None  # type: ignore[assignment]


def template_tokenizer(hf_checkpoint: str, *, trust_remote_code: bool = False) -> Any:
    """A tokenizer to render with, as :func:`load_tokenizer`; torch is not imported if there is a tokenizer.json."""
    check_files(Path(hf_checkpoint))
    if (Path(hf_checkpoint) / "tokenizer.json").is_file():
        _ignore_broken_torchvision()
        from transformers import PreTrainedTokenizerFast

        try:
            return with_checked_template(PreTrainedTokenizerFast.from_pretrained(hf_checkpoint))
        except ConfigError:
            raise
        except Exception:  # whatever is wrong with it, the next line says so
            pass
    return with_checked_template(load_tokenizer(hf_checkpoint, trust_remote_code=trust_remote_code))


def with_checked_template(tokenizer: Any) -> Any:
    """The tokenizer; a `ConfigError` if its chat template, which is a program, needs too much time or memory."""
    found = tokenizer.chat_template
    for template in found.values() if isinstance(found, dict) else [found] if isinstance(found, str) else []:
        if not _ends(template):
            raise ConfigError(
                f"the chat template of {tokenizer.name_or_path} takes more than {_TEMPLATE_SECONDS} s of computing, "
                f"{_TEMPLATE_BYTES >> 20} MiB or {_TEMPLATE_CHARACTERS:,} characters for a short conversation, so it "
                "is not used; look into it, and get the model from somewhere else"
            )
    return tokenizer


@functools.lru_cache(maxsize=32)
def _ends(template: str) -> bool:
    """Whether a template writes a conversation within its limits; a process of its own tries."""
    from transformers.utils.chat_template_utils import render_jinja_template

    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_TEMPLATE_WAIT)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (_TEMPLATE_SECONDS, _TEMPLATE_SECONDS))
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + _TEMPLATE_BYTES, used + _TEMPLATE_BYTES))
        for messages in (_TRIED[:1], _TRIED):
            how: dict[str, Any] = {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
            try:
                [text], _ = render_jinja_template([messages], chat_template=template, **how)
            except MemoryError:
                os._exit(1)
            except Exception:
                continue
            if len(text) > _TEMPLATE_CHARACTERS:
                os._exit(1)
        os._exit(0)
    finally:
        os._exit(1)


def apply_template(tokenizer: Any, messages: list[Message], tools: Tools, **how: Any) -> Any:
    """``tokenizer.apply_chat_template`` with a `DataError` if the template refuses the messages."""
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, **how)
    except Exception as error:  # a template is a program of the model's; it raises what it likes
        raise DataError(f"the chat template refuses the messages: {' '.join(str(error)[:1000].split())}") from error


class TextError(DataError):
    """A text has a character that no tokenizer can encode."""


def tokenized(tokenizer: Any, text: str, **how: Any) -> Any:
    """The tokenizer's value for a text; a `TextError` for half a surrogate pair, with its place."""
    try:
        return tokenizer(text, **how)
    except (TypeError, UnicodeError) as error:  # tokenizers says TypeError and nothing of the character
        at = next((place for place, one in enumerate(text) if "\ud800" <= one <= "\udfff"), None)
        if at is None:
            raise DataError(
                f"the tokenizer of {tokenizer.name_or_path} fails ({error}); get the model again"
            ) from error
        raise TextError(
            f"character {at + 1} of a text, {text[at]!a} behind {text[max(at - 20, 0) : at]!r}, is half a surrogate "
            "pair, which cannot be encoded; leave it out, or write the whole character"
        ) from None


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text without special tokens. Errors as of :func:`tokenized`."""
    return list(tokenized(tokenizer, text, add_special_tokens=False)["input_ids"])


def text_tokens(tokenizer: Any, text: str) -> list[int]:
    """Text as the tokenizer does it by itself, with a first token such as BOS once, even if the text has it already."""
    special = not text.startswith(tokenizer.bos_token or "\0")
    return list(tokenized(tokenizer, text, add_special_tokens=special)["input_ids"])


def unused_characters(*values: Any) -> list[str]:
    """Characters that occur nowhere in ``values``, to mark places in a template's text."""
    used = set(json.dumps(values, ensure_ascii=False, default=str))
    return [chr(code) for code in _PRIVATE_USE if chr(code) not in used]


def marked(value: Any, path: tuple[str | int, ...], offset: int, mark: str) -> Any:
    """A copy, as deep as it must be, with the mark in the text at ``path``."""
    if not path:
        return f"{(value or '')[:offset]}{mark}{(value or '')[offset:]}"
    copy: Any = list(value) if isinstance(value, list) else dict(value)
    inner = copy.get(path[0]) if isinstance(copy, dict) else copy[path[0]]
    copy[path[0]] = marked(inner, path[1:], offset, mark)
    return copy


def as_messages(prompt: Prompt, role: str = "user") -> list[Message]:
    """A prompt as chat messages; text is one message of ``role``."""
    return [{"role": role, "content": prompt}] if isinstance(prompt, str) else list(prompt)


class PromptEncoder:
    """Turns prompts into token ids; a `ConfigError` if a template is asked for and the tokenizer has none.

    With ``apply_chat_template``, text is one user message; ``template_kwargs`` are further arguments of the template,
    such as ``{"enable_thinking": False}``. With ``keep_messages``, chat messages without the template give no token
    ids: a custom generate function renders them.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        apply_chat_template: bool,
        template_kwargs: Mapping[str, Any] | None = None,
        keep_messages: bool = False,
    ) -> None:
        if apply_chat_template and not tokenizer.chat_template:
            raise ConfigError(
                f"--apply-chat-template: the tokenizer of {tokenizer.name_or_path} has no chat template; "
                "leave the flag out, or use a chat model's directory"
            )
        self.tokenizer = tokenizer
        self._template, self._keep_messages = apply_chat_template, keep_messages
        self._template_kwargs = {"add_generation_prompt": True, **(template_kwargs or {})}

    @classmethod
    def of(cls, config: RolloutConfig, tokenizer: Any) -> PromptEncoder:
        """The encoder that the flags ask for."""
        return cls(
            tokenizer,
            apply_chat_template=config.data.apply_chat_template,
            template_kwargs=config.data.chat_template_kwargs,
            keep_messages=config.takes_messages,
        )

    @property
    def digest(self) -> str:
        """A hash of the template, its arguments and what the tokenizer makes of a fixed text."""
        template = [self.tokenizer.chat_template, self._template_kwargs] if self._template else None
        text = json.dumps([template, self.tokenizer(_PROBE)["input_ids"]], sort_keys=True, default=repr)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def encode(self, prompt: Prompt, tools: Tools = None) -> list[int]:
        """The token ids of a prompt; a `DataError` if it gives none, or the template refuses it."""
        if self._template:
            messages = suited(as_messages(prompt), lambda some: self._render(some, tools))
            tokens = encode_text(self.tokenizer, self._render(messages, tools))
        elif isinstance(prompt, str):
            tokens = text_tokens(self.tokenizer, prompt)
        elif self._keep_messages:
            return []
        else:
            raise DataError("the prompt is chat messages; add --apply-chat-template, or write it as text")
        if not tokens:
            raise DataError(f"the prompt {prompt!r} gives no token; write a longer one")
        return tokens

    def _render(self, messages: list[Message], tools: Tools) -> str:
        return str(apply_template(self.tokenizer, messages, tools, tokenize=False, **self._template_kwargs))


class ChatTurns:
    """A chat that goes on after the model's turn, in tokens, without rendering the turn itself.

    The model's own tokens stay as they were sampled, and past turns that a template would write otherwise (Qwen3 leaves
    their reasoning out) stay as the model has seen them. Of ``args``, the template gets
    ``apply_chat_template_kwargs``.
    """

    def __init__(self, tokenizer: Any, args: HookArgs) -> None:
        self._tokenizer = tokenizer
        self._kwargs = json.loads(getattr(args, "apply_chat_template_kwargs", None) or "{}")

    def prompt(self, messages: list[Message], tools: Tools) -> list[int]:
        """Token ids of a conversation before the model's first turn."""
        self._check_template()
        encoder = PromptEncoder(self._tokenizer, apply_chat_template=True, template_kwargs=self._kwargs)
        return encoder.encode(messages, tools)

    def continuation(
        self, before: list[Message], messages: Sequence[Message], *, last_token: int | None, tools: Tools = None
    ) -> list[int]:
        """Token ids of new messages after the model's turn, with the beginning of its next one.

        The template is rendered with a mark in place of what the model wrote in answer to ``before``. Whatever it
        writes after the mark is the end of the turn, the new messages, and the beginning of the next turn. If
        ``last_token``, the turn's last, is a special token that ends a turn, it is not written again.

        Raises `DataError` if the template is missing, refuses the messages, or leaves out what the model writes.
        """
        self._check_template()
        mark = unused_characters(before, messages, tools)[0]
        how = {"tokenize": False, "add_generation_prompt": True, **self._kwargs}
        try:
            conversation = [*before, {"role": "assistant", "content": mark}, *messages]
            text = str(apply_template(self._tokenizer, conversation, tools, **how))
        except DataError as error:
            raise DataError(f"{error}; see which roles it knows, or observe text instead of messages") from error
        if text.count(mark) != 1:
            raise DataError(
                f"the chat template writes what the model said {text.count(mark)} times when "
                f"{len(messages)} messages follow, so a conversation cannot go on with it; observe text instead"
            )
        tokens = encode_text(self._tokenizer, text.partition(mark)[2])
        if tokens and tokens[0] == last_token and last_token in self._tokenizer.added_tokens_decoder:
            return tokens[1:]
        return tokens

    def _check_template(self) -> None:
        if not self._tokenizer.chat_template:
            raise DataError(
                f"the tokenizer of {self._tokenizer.name_or_path} has no chat template, so messages cannot be written; "
                "use a chat model's directory, or text"
            )


def suited(messages: list[Message], render: Rendering) -> list[Message]:
    """The messages in the form that the template expects, unchanged if it takes them as they are.

    | | null content beside tool calls | arguments of a tool call |
    |---|---|---|
    | DeepSeek | asked for: with empty text the calls are lost | their JSON as text; an object is refused |
    | GLM | written as the word ``None`` | an object; text is refused |
    | Qwen, Llama | either | an object; text is written as a JSON string in JSON, except by Qwen3 |

    They are unchanged if it refuses them in every form.
    """
    if not any(message.get("tool_calls") or message.get("content", "") is None for message in messages):
        return messages

    def flaws(some: list[Message]) -> tuple[bool, bool, int]:
        """Whether it refuses them, whether it writes arguments as a string in JSON, and how often ``None``."""
        try:
            text = render(some)
        except DataError:
            return True, False, 0
        texts = [one for message in some for call in _calls(message) if isinstance(one := _arguments(call), str)]
        quoted = any(json.dumps(one, ensure_ascii=plain) in text for one in texts for plain in (True, False))
        return False, quoted, text.count("None")

    if not any(flaws(messages)):
        return messages
    forms = [messages, _with_arguments(messages, _as_object), _with_arguments(messages, _as_text)]
    forms += [[{**one, "content": one.get("content") or ""} for one in form] for form in forms]
    return min(forms, key=flaws)


def _calls(message: Message) -> list[dict[str, Any]]:
    """Its tool calls; none if it has something else there, which is for the template to refuse."""
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) and all(isinstance(call, dict) for call in calls) else []


def _arguments(call: dict[str, Any]) -> Any:
    function = call.get("function", call)
    return function.get("arguments") if isinstance(function, dict) else None


def _with_arguments(messages: list[Message], change: Callable[[Any], Any]) -> list[Message]:
    """The messages with other arguments in their tool calls."""

    def call_of(call: dict[str, Any]) -> dict[str, Any]:
        if isinstance(call.get("function"), dict):
            return {**call, "function": call_of(call["function"])}
        return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call

    return [
        {**message, "tool_calls": [call_of(call) for call in _calls(message)]} if _calls(message) else message
        for message in messages
    ]


def _as_object(arguments: Any) -> Any:
    try:
        value = orjson.loads(arguments)
    except (orjson.JSONDecodeError, TypeError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
