"""Prompts to token ids, with the model's own tokenizer and chat template."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError, DataError
from slime_core.types import Message, Prompt
from slime_rollout.config import RolloutConfig
from slime_rollout.data.template_forms import suited

# Words, numbers, code and several scripts: two tokenizers hardly cut all of it alike.
_PROBE = (
    "The quick brown fox, 1234567890 + 3.14159 =\n\tdef f(x): return x**2  # naïve café 北京 Москва 🙂 <|im_start|>"
)


def load_tokenizer(hf_checkpoint: str) -> Any:
    """The tokenizer of a Hugging Face directory. transformers is imported here, not with this package.

    Raises:
        ConfigError: It is no directory, has no tokenizer that can be read, or transformers cannot be imported.
    """
    if not Path(hf_checkpoint).is_dir():
        raise ConfigError(f"--hf-checkpoint {hf_checkpoint} is no directory; give a model's, with tokenizer.json in it")
    _ignore_broken_torchvision()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(hf_checkpoint)
    except ImportError as error:
        raise ConfigError(f"transformers in {sys.executable} is incomplete: {error.__cause__ or error}") from error
    except Exception as error:  # whatever the many tokenizer classes raise for a broken file
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"--hf-checkpoint {hf_checkpoint} has no tokenizer that transformers can load ({reason}); "
            "give a directory with tokenizer.json"
        ) from error


def _ignore_broken_torchvision() -> None:
    """Treat a torchvision that cannot be imported as not installed; transformers would fail on it even for text.

    An engine environment on a CPU has such a pair: torchvision's CUDA build beside torch's CPU build.
    """
    if importlib.util.find_spec("torchvision") is not None:
        try:
            importlib.import_module("torchvision")
        except Exception:  # RuntimeError: operator torchvision::nms does not exist
            sys.modules["torchvision"] = None  # type: ignore[assignment]


class PromptEncoder:
    """Turns prompts into token ids.

    Text without a template is tokenized as the tokenizer does by itself, so a model that expects a first token such
    as BOS gets it; once, even if the text already begins with it. A rendered template brings its own special tokens.

    Args:
        tokenizer: A transformers tokenizer.
        apply_chat_template: Render prompts with its chat template; text then is one user message.
        template_kwargs: Further arguments of the template, such as ``{"enable_thinking": False}``.
        keep_messages: Chat messages without the template give no token ids: a custom generate function renders them.

    Raises:
        ConfigError: A template is asked for and the tokenizer has none.
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
        self._tokenizer = tokenizer
        self._template, self._keep_messages = apply_chat_template, keep_messages
        self._template_kwargs = {"add_generation_prompt": True, **(template_kwargs or {})}

    @classmethod
    def of(cls, config: RolloutConfig, tokenizer: Any) -> PromptEncoder:
        """The encoder that the flags ask for.

        Raises:
            ConfigError: A template is asked for and the tokenizer has none.
        """
        return cls(
            tokenizer,
            apply_chat_template=config.apply_chat_template,
            template_kwargs=config.chat_template_kwargs,
            keep_messages=config.takes_messages,
        )

    @property
    def digest(self) -> str:
        """A hash of the template, its arguments and what the tokenizer makes of a fixed text."""
        template = [self._tokenizer.chat_template, self._template_kwargs] if self._template else None
        text = json.dumps([template, self._tokenizer(_PROBE)["input_ids"]], sort_keys=True, default=repr)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def encode(self, prompt: Prompt, tools: list[dict[str, Any]] | None = None) -> list[int]:
        """The token ids of a prompt.

        Args:
            prompt: Text, or chat messages.
            tools: Descriptions of tools, for the chat template; nothing is done with them without it.

        Raises:
            DataError: The prompt gives no token, or the template refuses it.
        """
        if self._template:
            text, special = self._render(prompt, tools), False
        elif isinstance(prompt, str):
            text, special = prompt, not prompt.startswith(self._tokenizer.bos_token or "\0")
        elif self._keep_messages:
            return []
        else:
            raise DataError("the prompt is chat messages; add --apply-chat-template, or write it as text")
        tokens = list(self._tokenizer(text, add_special_tokens=special)["input_ids"])
        if not tokens:
            raise DataError(f"the prompt {prompt!r} gives no token; write a longer one")
        return tokens

    def _render(self, prompt: Prompt, tools: list[dict[str, Any]] | None) -> str:
        def render(messages: list[Message]) -> str:
            how = self._template_kwargs
            try:
                return str(self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **how))
            except Exception as error:  # a template is a program of the model's; it raises what it likes
                raise DataError(f"the chat template refuses the messages: {' '.join(str(error).split())}") from error

        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return render(suited(messages, render))
