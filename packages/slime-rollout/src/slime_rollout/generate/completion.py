"""SGLang's reply to `/generate`, read strictly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime_core.types import Status
from slime_rollout.errors import GenerationError

_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
_NOT_A_NUMBER = "NaN happened"  # what SGLang says it has matched then
_UNVERSIONED = "default"  # what SGLang calls the weights it was started with


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What an engine sampled. R is the number of tokens.

    Attributes:
        text: The tokens as text, without special tokens and stop strings.
        tokens: R token ids, the one that ended the response included.
        log_probs: R log-probs (nats) of these tokens.
        weight_versions: R numbers: the weight version that sampled each token; 0 for the weights at start.
        status: Completed, truncated or aborted.
        reason: The engine's own words for why it ended.
    """

    text: str
    tokens: list[int]
    log_probs: list[float]
    weight_versions: list[int]
    status: Status
    reason: str

    @classmethod
    def from_reply(cls, reply: Any) -> Completion:
        """Read the body of a reply.

        Raises:
            GenerationError: A field is missing, or has another form than SGLang documents.
        """
        try:
            meta = reply["meta_info"]
            pairs = meta.get("output_token_logprobs") or []
            finish = meta["finish_reason"]
            tokens = [int(token) for token in reply["output_ids"]]
            _check_alignment(tokens, [int(pair[1]) for pair in pairs], finish)
            return cls(
                text=reply["text"],
                tokens=tokens,
                log_probs=[float(pair[0]) for pair in pairs],
                weight_versions=_versions(meta, len(tokens)),
                status=_STATUS[finish["type"]],
                reason=str(finish.get("message") or finish["type"]),
            )
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            raise GenerationError(
                f"an engine's reply to /generate has an unknown form ({type(error).__name__}: {error}): "
                f"{str(reply)[:300]}; this slime speaks to SGLang 0.5"
            ) from error


def _check_alignment(tokens: list[int], scored: list[int], finish: dict[str, Any]) -> None:
    """Every token has a log-prob of its own.

    SGLang puts an end-of-text token in the place of one that a NaN gave, and calls that a stop; its log-probs still
    name the token that was drawn.
    """
    if len(scored) != len(tokens):
        raise GenerationError(f"an engine gave {len(scored)} log-probs for {len(tokens)} tokens")
    if finish.get("matched") == _NOT_A_NUMBER:
        raise GenerationError(
            "an engine's logits were no numbers (NaN); look at the last weight update, lower --lr or use --bf16"
        )
    for place, (token, other) in enumerate(zip(tokens, scored, strict=True)):
        if token != other:
            raise GenerationError(f"an engine gave the log-prob of token {other} for token {token} (place {place})")


def _versions(meta: dict[str, Any], length: int) -> list[int]:
    """The version of each token: from SGLang's spans where weights changed midway, else one for all."""
    versions = [_number(meta["weight_version"])] * length
    for span in meta.get("weight_versions") or []:
        for place in range(span["start"], min(span["end"], length)):
            versions[place] = _number(span["version"])
    return versions


def _number(version: str) -> int:
    if version == _UNVERSIONED:
        return 0
    try:
        return int(version)
    except ValueError:
        raise GenerationError(
            f"an engine names its weight version {version!r}; slime numbers versions from 0, so something else "
            "updated its weights, or it was started with --weight-version"
        ) from None
