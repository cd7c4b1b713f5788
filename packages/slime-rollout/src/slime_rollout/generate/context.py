"""What a generation has at hand: where requests go, how tokens are drawn, and with which seeds."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from slime_core.hooks import HookArgs
from slime_core.types import Group, Sample
from slime_rollout.config import RolloutConfig
from slime_rollout.eval_sets import EvalSet
from slime_rollout.generate.client import EngineClient

ROLLOUT_STREAM = "rollout"

# Settings of SGLang that take probability from a token or add some, at the values where they do not.
_PLAIN = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "ignore_eos": False,
}

DISTRIBUTION = frozenset(_PLAIN) - {"ignore_eos"} | {
    *("temperature", "top_p", "top_k", "min_new_tokens", "logit_bias", "custom_params"),
    *("json_schema", "regex", "ebnf", "structural_tag"),
}
"""SGLang's settings that change which distribution a token is drawn from."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of a request, without its seed.

    Attributes:
        temperature: 0 is greedy.
        top_p: Nucleus of probability kept.
        top_k: Likeliest tokens kept, -1 for all.
        max_new_tokens: Longest response, in tokens.
        max_context: Longest prompt and response together, in tokens; ``None`` leaves it to the engine.
        stop: Strings that end a response; the text then ends before the string, the tokens after it.
        stop_token_ids: Token ids that end a response, besides the model's own.
        min_new_tokens: Tokens before which no response ends by itself. 0 in rollouts: the trainer does not know it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 1024
    max_context: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0

    @classmethod
    def for_rollout(cls, config: RolloutConfig) -> SamplingParams:
        """The settings of training rollouts."""
        return cls(
            temperature=config.sampling.rollout_temperature,
            top_p=config.sampling.rollout_top_p,
            top_k=config.sampling.rollout_top_k,
            max_new_tokens=config.sampling.rollout_max_response_len,
            max_context=config.sampling.rollout_max_context_len,
            stop=config.sampling.rollout_stop,
            stop_token_ids=config.sampling.rollout_stop_token_ids,
        )

    @classmethod
    def for_evaluation(cls, held_out: EvalSet) -> SamplingParams:
        """The settings of a held-out set."""
        return cls(
            temperature=held_out.temperature,
            top_p=held_out.top_p,
            top_k=held_out.top_k,
            max_new_tokens=held_out.max_response_len,
            max_context=held_out.max_context_len,
            stop=held_out.stop,
            stop_token_ids=held_out.stop_token_ids,
            min_new_tokens=held_out.min_new_tokens,
        )

    def room(self, sample: Sample) -> int:
        """How many tokens a sample's response may still grow by."""
        room = self.max_new_tokens - sample.response_length
        if self.max_context is not None:
            room = min(room, self.max_context - len(sample.tokens))
        return max(room, 0)

    def to_request(self, seed: int, *, max_new_tokens: int | None = None) -> dict[str, Any]:
        """SGLang's ``sampling_params`` with the request's seed, and its own limit if it has one.

        Everything that shapes the distribution is written out: whatever an engine was configured to prefer
        (``--preferred-sampling-params``), the trainer computes log-probs of the plain one. The seed counts only if the
        engine runs with ``--enable-deterministic-inference``.
        """
        longest = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        return {
            **_PLAIN,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_new_tokens": longest,
            "min_new_tokens": min(self.min_new_tokens, longest),
            "stop": list(self.stop),
            "stop_token_ids": list(self.stop_token_ids),
            "sampling_seed": seed,
        }


def sampling_seed(run_seed: int, sample_index: int, turn: int = 0, stream: str = ROLLOUT_STREAM) -> int:
    """Seed of one generation request, so that a sample's tokens depend on nothing that runs at the same time.

    The first 63 bits of BLAKE2b over the text ``stream:run_seed:sample_index:turn``: the same in every process, Python
    version and machine, and without relation between neighbouring samples. 63 bits, as SGLang takes a signed 64-bit
    number.

    Args:
        run_seed: Seed of the run.
        sample_index: Number of the sample in its stream.
        turn: Number of the request within the sample.
        stream: What the sample is for. Evaluation has streams of its own, so that it disturbs no rollout.

    Returns:
        A number from 0 to 2**63 - 1.
    """
    text = f"{stream}:{run_seed}:{sample_index}:{turn}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationContext:
    """What a generation has at hand. One object serves all samples of a rollout, or of one held-out set.

    Attributes:
        client: Where requests go.
        params: How tokens are drawn.
        run_seed: Seed of the run, which every request's own seed comes from.
        stream: What the samples are for: ``rollout``, or ``eval/`` and the name of a held-out set.
        tokenizer: The model's; ``None`` where no tokens are written here.
        args: Every flag by its name, for hooks.
        stop: Set when no further request is to be sent; what is unfinished then goes back to the data source.
    """

    client: EngineClient
    params: SamplingParams
    run_seed: int
    stream: str = ROLLOUT_STREAM
    tokenizer: Any = None
    args: HookArgs = dataclasses.field(default_factory=lambda: HookArgs({}))
    stop: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @property
    def evaluation(self) -> bool:
        """Whether the samples are scored only, and not trained on."""
        return self.stream != ROLLOUT_STREAM

    def seed(self, sample: Sample, turn: int = 0) -> int:
        """Seed of a sample's request; the engine mixes each token's place in the sequence into it.

        So a response that was cut off continues with the seed it began with, as if nothing had happened.
        """
        return sampling_seed(self.run_seed, sample.index, turn, self.stream)


GenerateGroup = Callable[[Group, GenerationContext], list[Awaitable[list[Sample]]]]
"""Splits a group into what is generated independently, mostly one piece of work for each sample.

Each returns what to train on: the samples it was for, or several of one ``trajectory_id`` where an interaction yields
several. Samples that came finished are returned unchanged.
"""


def with_router(args: HookArgs, url: str) -> HookArgs:
    """Every flag, with ``sglang_router_ip`` and ``sglang_router_port`` where the router really is."""
    place = urlsplit(url)
    values = {name: getattr(args, name) for name in args}
    return HookArgs(values | {"sglang_router_ip": place.hostname, "sglang_router_port": place.port})
