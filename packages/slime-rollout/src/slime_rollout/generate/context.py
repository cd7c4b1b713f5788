"""Sampling settings, seeds, and the generation of one response for one prompt."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from slime_core.former_names import former_attribute
from slime_core.hooks import HookArgs
from slime_core.types import Group, Sample, Status
from slime_core.types.routed import count_routed
from slime_rollout.config import MOST_KEPT, RolloutConfig
from slime_rollout.errors import GenerationError
from slime_rollout.eval_sets import EvalSet
from slime_rollout.generate.client import EngineClient
from slime_rollout.generate.completion import Completion, stop_texts
from slime_rollout.generate.turn_log import TurnLog
from slime_rollout.limits import ModelLimits

FINISHED = (Status.COMPLETED, Status.TRUNCATED)
ROLLOUT_STREAM = "rollout"
NO_LIMITS = ModelLimits()
_TEXT_BEFORE = 5  # tokens, as SGLang takes

# Settings of SGLang that take probability from a token or add some, at the values where they do not.
_PLAIN = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "ignore_eos": False}

DISTRIBUTION = frozenset(_PLAIN) - {"ignore_eos"} | {
    *("temperature", "top_p", "top_k", "min_p", "min_new_tokens", "logit_bias", "custom_params"),
    *("json_schema", "regex", "ebnf", "structural_tag"),
}
"""SGLang's settings that change which distribution a token is drawn from."""


def keeps_all(sampling_params: Mapping[str, Any]) -> bool:
    """Whether these settings of SGLang's sample from the whole vocabulary."""
    return (sampling_params["top_p"], sampling_params["top_k"], sampling_params["min_p"]) == (1.0, -1, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of a request, without its seed.

    Attributes:
        temperature: 0 is greedy.
        top_p: Nucleus of probability kept.
        top_k: Likeliest tokens kept, -1 for all.
        min_p: Tokens kept have at least this part of the likeliest one's probability.
        max_new_tokens: Longest response, in tokens.
        max_context: Longest prompt and response together, in tokens; ``None`` leaves it to the engine.
        stop: Strings that end a response; tokens and text end with the token that completes one.
        stop_token_ids: Token ids that end a response, besides the model's own.
        skip_special_tokens: Leave special tokens out of the text.
        min_new_tokens: Fewest tokens of a response. 0 in rollouts: the trainer does not know it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_new_tokens: int = 1024
    max_context: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    min_new_tokens: int = 0

    @classmethod
    def for_rollout(cls, config: RolloutConfig) -> SamplingParams:
        """Those of training rollouts."""
        return cls(
            temperature=config.sampling.rollout_temperature,
            top_p=config.sampling.rollout_top_p,
            top_k=config.sampling.rollout_top_k,
            min_p=config.sampling.rollout_min_p,
            max_new_tokens=config.sampling.rollout_max_response_len,
            max_context=config.sampling.rollout_max_context_len,
            stop=config.sampling.rollout_stop,
            stop_token_ids=config.sampling.rollout_stop_token_ids,
            skip_special_tokens=config.sampling.skips_special_tokens,
        )

    @classmethod
    def for_evaluation(cls, held_out: EvalSet) -> SamplingParams:
        """Those of a held-out set."""
        return cls(
            temperature=held_out.temperature,
            top_p=held_out.top_p,
            top_k=held_out.top_k,
            min_p=held_out.config.sampling.rollout_min_p,
            max_new_tokens=held_out.max_response_len,
            max_context=held_out.max_context_len,
            stop=held_out.stop,
            stop_token_ids=held_out.stop_token_ids,
            skip_special_tokens=held_out.skip_special_tokens,
            min_new_tokens=held_out.min_new_tokens,
        )

    room = former_attribute("room", "tokens_left")

    def tokens_left(self, sample: Sample, limits: ModelLimits = NO_LIMITS) -> int:
        """How many tokens a sample's response may still grow by, with a model of ``limits``."""
        left = self.max_new_tokens - sample.response_length
        if self.max_context is not None:
            left = min(left, self.max_context - len(sample.tokens))
        if (most := limits.tokens_left(len(sample.tokens))) is not None:
            left = min(left, most)
        return max(left, 0)

    def to_request(self, seed: int, *, max_new_tokens: int | None = None) -> dict[str, Any]:
        """SGLang's ``sampling_params`` of one request.

        Everything that shapes the distribution is written out: the trainer computes log-probs of the plain one,
        whatever defaults an engine has (``--preferred-sampling-params``). The seed counts only if the engine runs with
        ``--enable-deterministic-inference``.
        """
        longest = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        return {
            **_PLAIN,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "max_new_tokens": longest,
            "min_new_tokens": min(self.min_new_tokens, longest),
            "stop": list(self.stop),
            "stop_token_ids": list(self.stop_token_ids),
            "no_stop_trim": True,
            "skip_special_tokens": self.skip_special_tokens,
            "sampling_seed": seed,
        }


def sampling_seed(run_seed: int, sample_index: int, turn: int = 0, stream: str = ROLLOUT_STREAM) -> int:
    """Seed of one generation request, so that a sample's tokens depend on nothing that runs at the same time.

    The first 63 bits (SGLang takes a signed 64-bit number) of BLAKE2b over ``stream:run_seed:sample_index:turn``: the
    same in every process and on every machine, and unrelated between neighbouring samples. ``turn`` is the number of
    the request within the sample. Evaluation has streams of its own, so that it does not affect rollouts.
    """
    text = f"{stream}:{run_seed}:{sample_index}:{turn}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationContext:
    """Settings and services with which all samples of a rollout, or of one held-out set, are generated.

    ``stream`` says what the samples are for: ``rollout``, or ``eval/`` and the name of a held-out set. ``tokenizer`` is
    ``None`` only where nothing is tokenized or decoded. ``args`` holds every flag by its name, for hooks. Once ``stop``
    is set no further request is sent, and what is unfinished goes back to the data source. With ``with_experts``
    engines say of samples that are to be trained on which experts they chose. ``turns`` knows what engines and tools
    have answered before a restart; it is for samples of the run's rollouts alone. ``limits`` are the model's.
    """

    client: EngineClient
    params: SamplingParams
    run_seed: int
    stream: str = ROLLOUT_STREAM
    tokenizer: Any = None
    args: HookArgs = dataclasses.field(default_factory=lambda: HookArgs({}))
    stop: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    with_experts: bool = False
    turns: TurnLog | None = None
    limits: ModelLimits = NO_LIMITS

    @property
    def evaluation(self) -> bool:
        """Whether the samples are only scored, and not trained on."""
        return self.stream != ROLLOUT_STREAM

    def request(
        self,
        sample: Sample,
        turn: int = 0,
        *,
        most: int | None = None,
        changes: Mapping[str, Any] = MappingProxyType({}),
        room: int | None = None,
    ) -> dict[str, Any]:
        """Arguments of :meth:`EngineClient.generate` for at most ``most`` tokens, with changed settings of SGLang's.

        If these keep a part of the vocabulary only, and the sample is to be trained on, the engine says which. Raises
        `GenerationError` for a token outside the model's vocabulary, which would end the engine.
        """
        if room is not None:
            said = "GenerationContext.request(room=…) is now most=…; the old name goes with the next release"
            warnings.warn(said, DeprecationWarning, stacklevel=2)
            most = room
        self._check_tokens(sample, changes)
        params = self.params.to_request(self.seed(sample, turn), max_new_tokens=most) | dict(changes)
        with_kept = not self.evaluation and not keeps_all(params)
        if with_kept and params["top_k"] == -1:
            params["top_k"] = MOST_KEPT
        experts_from = None
        if self.with_experts and not self.evaluation:
            text = sample.routed_experts
            experts_from = 0 if text is None else count_routed(f"sample {sample.index}", text)
        return {
            "sampling_params": params,
            "session_id": sample.session_id,
            "with_kept": with_kept,
            "experts_from": experts_from,
        }

    room = former_attribute("room", "tokens_left")

    def tokens_left(self, sample: Sample) -> int:
        """How many tokens a sample's response may still grow by."""
        return self.params.tokens_left(sample, self.limits)

    def _check_tokens(self, sample: Sample, changes: Mapping[str, Any]) -> None:
        biased = [int(token) for token in changes.get("logit_bias") or ()]
        stops = [*(changes.get("stop_token_ids") or ())]
        for what, tokens in {"": sample.tokens, "stop_token_ids: ": stops, "logit_bias: ": biased}.items():
            if problem := self.limits.token_problem(tokens, self.tokenizer):
                raise GenerationError(f"sample {sample.index}: {what}{problem}")

    def text_of(self, tokens: Sequence[int], after: Sequence[int]) -> str:
        """Tokens as the text that they add to those before them, whole tokens and without special ones as chosen.

        A tokenizer may write a token in another way at the beginning (SentencePiece leaves out a space), so those
        before count. Raises GenerationError without a tokenizer.
        """
        if self.tokenizer is None:
            raise GenerationError("tokens become text by the model's tokenizer, and this context has none")
        skip, before = self.params.skip_special_tokens, list(after[-_TEXT_BEFORE:])
        known: str = self.tokenizer.decode(before, skip_special_tokens=skip)
        whole: str = self.tokenizer.decode([*before, *tokens], skip_special_tokens=skip)
        return whole[len(known) :]

    def up_to_stop(self, sample: Sample, request: Mapping[str, Any], done: Completion, begun: int) -> Completion:
        """An answer up to a stop text that begins before a cut; the last ``begun`` tokens are of the same response."""
        stops = stop_texts(request["sampling_params"])
        if not stops or self.tokenizer is None or not (begun or done.cuts):
            return done
        before = sample.tokens[len(sample.tokens) - begun :]
        return done.up_to_stop(before, stops, functools.partial(self.tokenizer.decode, skip_special_tokens=False))

    async def next_turn(self, sample: Sample, request: dict[str, Any], begun: int = 0) -> Completion:
        """An engine's answer to a :meth:`request`, perhaps of before a restart. Errors as of the client's.

        The last ``begun`` tokens of the sample are of the same turn.
        """
        known = None if self.turns is None else self.turns.turn(sample, request)
        if known is not None:
            return known
        done = self.up_to_stop(sample, request, await self.client.generate(sample.tokens, **request), begun)
        if self.turns is not None:
            self.turns.add_turn(sample, request, done)
        return done

    def seed(self, sample: Sample, turn: int = 0) -> int:
        """Seed of a sample's request; the engine combines it with each token's place in the sequence.

        So a response that was cut off continues with its seed as if it had not been.
        """
        return sampling_seed(self.run_seed, sample.index, turn, self.stream)


GenerateGroup = Callable[[Group, GenerationContext], list[Awaitable[list[Sample]]]]
"""Splits a group into independent pieces of work, mostly one for each sample.

Each returns what to train on: its samples, or several of one ``trajectory_id`` where an interaction yields several.
Samples that were finished before are returned unchanged.
"""


def single_turn(group: Group, context: GenerationContext) -> list[Awaitable[list[Sample]]]:
    """One response for each sample of a group. A :data:`GenerateGroup`."""
    return [generate_sample(sample, context) for sample in group]


async def generate_sample(sample: Sample, context: GenerationContext) -> list[Sample]:
    """Sample the response of a sample, or the rest of an ``ABORTED`` one, and fill it in. Returns the sample.

    A finished sample stays as it is, and so does any once ``context.stop`` is set. Raises what
    :meth:`EngineClient.generate` raises.
    """
    if sample.status in FINISHED or context.stop.is_set():
        return [sample]
    if sample.status is not Status.ABORTED:
        clear_response(sample)
    left = context.tokens_left(sample)
    if not left:
        sample.status = Status.TRUNCATED
        return [sample]
    request = context.request(sample, most=left)
    done = await context.client.generate(sample.tokens, **request)
    _extend(sample, context.up_to_stop(sample, request, done, sample.response_length), context)
    return [sample]


def clear_response(sample: Sample) -> None:
    """Reset a sample to its prompt."""
    sample.tokens = sample.prompt_tokens
    sample.response, sample.response_length = "", 0
    sample.loss_mask = sample.rollout_log_probs = sample.teacher_log_probs = None
    sample.weight_versions, sample.kept_tokens, sample.routed_experts = [], None, None
    sample.reward, sample.status = None, Status.PENDING


def _extend(sample: Sample, done: Completion, context: GenerationContext) -> None:
    """Append what an engine sampled; of an aborted request nothing without a tokenizer, which its text needs."""
    has_tokenizer = context.tokenizer is not None
    if not has_tokenizer and done.status is Status.ABORTED:
        done = Completion.nothing()
    text = sample.response + done.text
    if done.tokens:
        done.append_to(sample)
    elif not sample.response_length:
        sample.rollout_log_probs = []
    # Of all tokens, and not the engine's words: these end with the stop string and not with its token, and a character
    # may have bytes on both sides of a cut.
    sample.response = context.text_of(sample.response_tokens, sample.prompt_tokens) if has_tokenizer else text
    sample.status = done.status


def with_router(args: HookArgs, url: str, key: str | None = None) -> HookArgs:
    """The flags with the router's actual address in ``sglang_router_ip`` and ``_port``, and its key."""
    place = urlsplit(url)
    return args | {"sglang_router_ip": place.hostname, "sglang_router_port": place.port, "sglang_api_key": key}
