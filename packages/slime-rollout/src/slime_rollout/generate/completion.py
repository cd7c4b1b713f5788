"""SGLang's reply to `/generate`, read strictly."""

from __future__ import annotations

import base64
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from slime_core.types import Sample, Status
from slime_core.types.kept import kept_text
from slime_core.types.routed import EXPERTS
from slime_rollout.errors import GenerationError
from slime_rollout.http import INCOMPLETE, excerpt
from slime_rollout.limits import LARGEST_LOG_PROB, LEAST_LOG_PROB

_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
_NOT_A_NUMBER = "NaN happened"  # what SGLang says it has matched then
# Settings by which an engine looks at all of a response, and with which values it does not.
_OF_THE_WHOLE = {
    **dict.fromkeys(("stop_regex", "regex", "json_schema", "ebnf", "structural_tag")),
    **{"min_new_tokens": 0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
}
_VERSION_DIGITS = 18
_SHOWN = 300

_Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_LogProb = Annotated[float, msgspec.Meta(gt=LEAST_LOG_PROB, le=LARGEST_LOG_PROB)]
_Place = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Finish(msgspec.Struct):
    type: Literal["stop", "length", "abort"]
    message: str | None = None
    matched: Any = None


class _Span(msgspec.Struct):
    version: str
    start: _Place
    end: _Place


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    weight_version: str
    completion_tokens: _Place | None = None
    output_token_logprobs: list[tuple[_LogProb, int, Any]] | None = None
    output_token_sampling_mask: list[list[_Token]] | None = None
    output_token_sampling_logprobs: list[_LogProb] | None = None
    weight_versions: list[_Span] | None = None
    routed_experts: str | None = None


class _Reply(msgspec.Struct):
    """The fields of a reply that count here; others are skipped unread."""

    text: str
    output_ids: list[_Token]
    meta_info: _Meta


_decoder = msgspec.json.Decoder(_Reply)


class FailedUpdateError(GenerationError):
    """A reply has tokens from weights of an update that failed midway; another attempt may succeed."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The R tokens that an engine sampled.

    Attributes:
        text: The tokens as text, as the engine gives it: up to the end of a stop string, even inside a token; empty if
            the request was aborted, and of the last request alone if several sampled the tokens.
        tokens: R token ids, the one that ended the response included.
        log_probs: R log-probs (nats) of these tokens; where ``kept`` is known, over the tokens kept.
        weight_versions: R numbers: the weight version that sampled each token; 0 for the weights at start.
        kept: R sets of token ids: those that top-p, top-k or min-p left each token to be sampled from; ``None`` if that
            was not asked for.
        experts_TW: The experts chosen, a row for each token but the last of those that were asked for; ``None`` if they
            were not.
        status: Completed, truncated or aborted.
        reason: The engine's own words for why it ended.
        cuts: Places in the tokens where another request went on.
    """

    text: str
    tokens: list[int]
    log_probs: list[float]
    weight_versions: list[int]
    status: Status
    reason: str
    kept: list[list[int]] | None = None
    experts_TW: NDArray[np.int32] | None = dataclasses.field(default=None, compare=False)
    cuts: list[int] = dataclasses.field(default_factory=list)

    @property
    def kept_tokens(self) -> str | None:
        """The sets as `Sample.kept_tokens` has them."""
        return None if self.kept is None else kept_text(self.kept)

    def append_to(self, sample: Sample) -> None:
        """Append the tokens to a sample's response, with what is known of each, but without their text."""
        sample.append_response(
            self.tokens,
            log_probs=self.log_probs,
            weight_version=self.weight_versions,
            kept_tokens=self.kept_tokens,
            routed_experts=self.experts_TW,
        )

    @classmethod
    def from_json(
        cls,
        content: bytes,
        *,
        with_kept: bool = False,
        expert_rows: int | None = None,
        most: int | None = None,
        vocab_size: int | None = None,
    ) -> Completion:
        """Read the body of a reply: JSON to checked fields in one pass.

        Args:
            with_kept: Whether the tokens kept were asked for.
            expert_rows: Of how many tokens of the input the experts were asked for, besides those that were sampled.
            most: Most tokens that were asked for; ``None`` for any number.
            vocab_size: Token ids are below; ``None`` if that is not known.

        Raises:
            GenerationError: The reply is invalid, or is not to what was asked.
            FailedUpdateError: The weights are those of an update that failed.
        """
        try:
            reply = _decoder.decode(content)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            if f'"{_NOT_A_NUMBER}"'.encode() in content:  # the log-probs are null then
                raise _not_a_number() from None
            why = excerpt(f"{type(error).__name__}: {error}")
            raise GenerationError(
                f"an engine's reply to /generate has an unknown form ({why}): {excerpt(content)}; "
                "this slime speaks to SGLang 0.5"
            ) from error
        meta, tokens = reply.meta_info, reply.output_ids
        versions = _versions(meta, len(tokens))  # first: nothing else counts in a reply with weights of a failed update
        _check_tokens(reply, most, vocab_size)
        return cls(
            text=reply.text,
            tokens=tokens,
            log_probs=_kept_log_probs(tokens, meta, vocab_size) if with_kept else _log_probs(tokens, meta),
            weight_versions=versions,
            kept=meta.output_token_sampling_mask or [] if with_kept else None,
            experts_TW=None if expert_rows is None or not tokens else _experts(meta, expert_rows + len(tokens)),
            status=_STATUS[meta.finish_reason.type],
            reason=meta.finish_reason.message or meta.finish_reason.type,
        )

    def certain(self, sampling_params: Mapping[str, Any]) -> Completion:
        """The beginning of an aborted response that another request can continue.

        An engine that aborts does not check whether the last token ends the response, so that token is left out. The
        next request does not see earlier text, so no stop string may have begun: as many tokens are left out as the
        longest one has bytes. That number does not depend on what was sampled, so sampling them again adds no bias.
        Nothing is kept under a grammar, a penalty or the like, which looks at a response as a whole.
        """
        unsure = max(1, most_tokens(stop_texts(sampling_params)))
        whole = any((sampling_params.get(name) or plain) != plain for name, plain in _OF_THE_WHOLE.items())
        return self._first(0 if whole else max(0, len(self.tokens) - unsure))

    def up_to_stop(self, before: Sequence[int], stops: Sequence[str], decode: Callable[[list[int]], str]) -> Completion:
        """The tokens up to the one that completes a stop text which begins before a cut.

        The engine does not see one: its request begins at the cut. What is kept before a cut may end with the beginning
        of a stop text, and other weights may go on with the rest.

        Args:
            before: The tokens of the same response that came earlier, if it was cut off.
            decode: From tokens to text, with special ones.
        """
        most, said = most_tokens(stops), [*before, *self.tokens]
        for cut in (place + len(before) for place in [*([0] if before else []), *self.cuts]):
            first = max(0, cut - most)
            for end in range(cut + 1, min(cut + most, len(said)) + 1):
                text = decode(said[first:end])
                if any(stop in text for stop in stops):
                    ended = self._first(end - len(before))
                    return dataclasses.replace(ended, text=decode(ended.tokens), status=Status.COMPLETED, reason="stop")
        return self

    def _first(self, kept: int) -> Completion:
        """The first so many tokens."""
        if kept == len(self.tokens):
            return self
        return dataclasses.replace(
            self,
            text="",
            tokens=self.tokens[:kept],
            log_probs=self.log_probs[:kept],
            weight_versions=self.weight_versions[:kept],
            kept=None if self.kept is None else self.kept[:kept],
            experts_TW=None if self.experts_TW is None or not kept else self.experts_TW[: kept - len(self.tokens)],
            cuts=[cut for cut in self.cuts if cut < kept],
        )

    def followed_by(self, rest: Completion) -> Completion:
        """The tokens of this request, and then those of the one that went on from there."""
        if not self.tokens:
            return rest
        tables = [table for table in (self.experts_TW, rest.experts_TW) if table is not None]
        return dataclasses.replace(
            rest,
            tokens=self.tokens + rest.tokens,
            log_probs=self.log_probs + rest.log_probs,
            weight_versions=self.weight_versions + rest.weight_versions,
            kept=None if self.kept is None else self.kept + (rest.kept or []),
            experts_TW=np.concatenate(tables) if tables else None,
            cuts=[*self.cuts, len(self.tokens), *(len(self.tokens) + cut for cut in rest.cuts)],
        )

    @classmethod
    def nothing(cls) -> Completion:
        """The result of a request that was aborted before an engine answered."""
        return cls(
            text="", tokens=[], log_probs=[], weight_versions=[], status=Status.ABORTED, reason="aborted unanswered"
        )


def stop_texts(sampling_params: Mapping[str, Any]) -> tuple[str, ...]:
    """The stop texts of a request."""
    stops = sampling_params.get("stop") or ()
    return (stops,) if isinstance(stops, str) else tuple(stops)


def most_tokens(stops: Sequence[str]) -> int:
    """Most tokens that a stop text can be: each has a byte at least; 0 without one."""
    return max((len(stop.encode(errors="replace")) for stop in stops), default=0)


def _check_tokens(reply: _Reply, most: int | None, vocab_size: int | None) -> None:
    """Raise GenerationError unless these tokens can be the reply to a request for ``most`` at most."""
    count, end = len(reply.output_ids), reply.meta_info.finish_reason.type
    if most is not None and count > most:
        raise GenerationError(f"an engine gave {count} tokens where at most {most} were asked for")
    if not count and end != "abort" and most != 0:
        raise GenerationError(f"an engine ended a response ({end}) without a token")
    _check_vocabulary(max(reply.output_ids, default=0), vocab_size)


def _check_vocabulary(largest: int, vocab_size: int | None) -> None:
    if vocab_size is not None and largest >= vocab_size:
        raise GenerationError(
            f"an engine gave the token {largest}, outside the model's vocabulary of {vocab_size}; it must serve the "
            "model of --hf-checkpoint"
        )


def _log_probs(tokens: list[int], meta: _Meta) -> list[float]:
    """The log-prob of each token.

    Where a NaN gave a token, SGLang replaces it with an end-of-text token and reports a stop; its log-probs still name
    the original.
    """
    entries = meta.output_token_logprobs or []
    if len(entries) != len(tokens):
        raise GenerationError(f"an engine gave {len(entries)} log-probs for {len(tokens)} tokens")
    if meta.finish_reason.matched == _NOT_A_NUMBER:
        raise _not_a_number()
    own = [log_prob for (log_prob, named, _), token in zip(entries, tokens, strict=True) if named == token]
    if len(own) != len(tokens):
        place = next(place for place, token in enumerate(tokens) if entries[place][1] != token)
        raise GenerationError(
            f"an engine gave the log-prob of token {entries[place][1]} for token {tokens[place]} (place {place})"
        )
    if (said := meta.completion_tokens) is not None and said != len(tokens):
        raise GenerationError(f"an engine says that it sampled {said} tokens, and gave {len(tokens)}")
    return own


def _kept_log_probs(tokens: list[int], meta: _Meta, vocab_size: int | None) -> list[float]:
    """The log-prob of each token over the tokens kept. Raises GenerationError unless it is one of them."""
    _log_probs(tokens, meta)
    kept, log_probs = meta.output_token_sampling_mask or [], meta.output_token_sampling_logprobs or []
    if not len(kept) == len(log_probs) == len(tokens):
        raise GenerationError(
            f"an engine said of {len(kept)} of {len(tokens)} tokens what they were sampled from, which training under "
            "--rollout-top-p, --rollout-top-k or --rollout-min-p needs (return_sampling_mask of SGLang 0.5.23); take "
            "such an engine, or leave these flags out"
        )
    counts_R = np.fromiter(map(len, kept), np.int64, len(kept))
    ids_K = np.fromiter(itertools.chain.from_iterable(kept), np.int64, int(counts_R.sum()))  # a set after the other
    _check_vocabulary(int(ids_K.max(initial=0)), vocab_size)
    rows_K = np.repeat(np.arange(len(kept)), counts_R)
    found_R = np.bincount(rows_K[ids_K == np.repeat(tokens, counts_R)], minlength=len(kept))
    if len(lacking := np.flatnonzero(found_R == 0)):
        place = int(lacking[0])
        raise GenerationError(
            f"an engine sampled token {tokens[place]} (place {place}) from tokens without it: {kept[place][:8]}"
        )
    sorted_K = np.sort(rows_K << 31 | ids_K)  # ids have 31 bits
    if len(twice := np.flatnonzero(sorted_K[1:] == sorted_K[:-1])):
        raise GenerationError(
            f"an engine names a token twice among those that it sampled place {int(sorted_K[twice[0]] >> 31)} from"
        )
    return log_probs


def _experts(meta: _Meta, count: int) -> NDArray[np.int32]:
    """The experts of ``count`` tokens, a row each. Raises GenerationError if there are others, or none."""
    try:
        flat = np.frombuffer(base64.b64decode(meta.routed_experts or "", validate=True), "<i4")
    except ValueError as error:
        raise GenerationError(f"an engine's routed_experts are invalid: {error}") from error
    if not flat.size or not count or flat.size % count or flat.min() < 0 or flat.max() >= EXPERTS:
        raise GenerationError(
            f"an engine gave {flat.size} numbers of experts for {count} tokens, which --use-rollout-routing-replay "
            "needs (return_routed_experts of SGLang 0.5.23, a model with experts); take such an engine, or leave the "
            "flag out"
        )
    return flat.reshape(count, -1)


def _not_a_number() -> GenerationError:
    return GenerationError(
        "an engine's logits were not numbers (NaN); look at the last weight update, lower --lr or use --bf16"
    )


def _versions(meta: _Meta, length: int) -> list[int]:
    """The version of each token: from SGLang's spans where weights changed midway, else one for all."""
    version = _number(meta.weight_version)
    if meta.weight_versions is None:
        return [version] * length
    versions: list[int] = []
    for span in meta.weight_versions:
        if span.start != len(versions) or span.end < span.start:
            break
        versions += [_number(span.version)] * (min(span.end, length) - span.start)
    else:
        if len(versions) == length:
            return versions
    named = ", ".join(f"{span.start} to {span.end}" for span in meta.weight_versions[:8]) or "none"
    raise GenerationError(f"an engine names weight versions of other tokens ({named}) than the {length} that it gave")


def _number(version: str) -> int:
    if version == "default":  # what SGLang calls the weights that it was started with
        return 0
    if version == INCOMPLETE:
        raise FailedUpdateError("weights of an update that failed")
    if version.isascii() and version.isdigit() and len(version) <= _VERSION_DIGITS:
        return int(version)
    raise GenerationError(
        f"an engine names its weight version {version[:_SHOWN]!a}; slime numbers versions from 0, so something else "
        "updated its weights, or it was started with --weight-version"
    )
