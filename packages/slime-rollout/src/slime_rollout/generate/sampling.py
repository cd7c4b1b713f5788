"""How tokens are drawn, in training rollouts and in evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime_rollout.config import RolloutConfig
from slime_rollout.eval_sets import EvalSet

# Nothing else takes probability from a token or gives it any.
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


@dataclass(frozen=True, kw_only=True)
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
        min_new_tokens: Tokens before which no response ends by itself. 0 in rollouts: the trainer knows nothing of it.
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
            temperature=config.rollout_temperature,
            top_p=config.rollout_top_p,
            top_k=config.rollout_top_k,
            max_new_tokens=config.rollout_max_response_len,
            max_context=config.rollout_max_context_len,
            stop=config.rollout_stop,
            stop_token_ids=config.rollout_stop_token_ids,
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

    def to_request(self, seed: int, *, max_new_tokens: int | None = None) -> dict[str, Any]:
        """SGLang's ``sampling_params`` with the request's seed, and its own limit where it has one.

        Everything that shapes the distribution is written out: whatever an engine was told to prefer
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
