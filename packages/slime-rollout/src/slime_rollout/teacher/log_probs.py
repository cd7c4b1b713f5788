"""Log-probs of responses under the teacher's weights, one for each response token."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from slime_core.errors import DataError
from slime_core.types import Sample, Status
from slime_rollout import failures
from slime_rollout.errors import TeacherError
from slime_rollout.http import HttpError
from slime_rollout.service import ATTEMPTS, REQUESTS, Service

logger = logging.getLogger(__name__)

FAILURE_KEY = failures.TEACHER
"""Entry of a sample's metadata that says why the teacher gave no log-probs."""
SHOWN_CHARACTERS = 300
LARGEST = 1e300  # of what is a number; a comparison that NaN fails too


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeacherVocabulary:
    """What the teacher can be asked about.

    Attributes:
        largest: Largest token id that it knows and the student may write.
        shown_as_zero: The last id of its vocabulary, if the student may write it. SGLang takes that for the placeholder
            of an image and writes 0 in its place, beside the right log-prob.
    """

    largest: int
    shown_as_zero: int | None = None

    def may_be_shown_as(self, token: int, shown: Any) -> bool:
        """Whether an answer that names ``shown`` is about ``token``."""
        return type(shown) is int and (shown == token or (shown == 0 and token == self.shown_as_zero))


class TeacherLogProbs:
    """Asks the teacher about finished samples and sets their ``teacher_log_probs``.

    Each is one request: prompt and response as token ids, nothing to generate. The values are those of the teacher's
    own distribution, at temperature 1. Untrained tokens of a response, such as a tool's answer, get theirs too.

    Args:
        url: Address of a SGLang server, or of a router before several.
        timeout: Time limit of one attempt, in seconds; there are four.
        vocabulary: What it can be asked about.
        drop: Leave a sample that gets no log-probs out of training instead of ending the run; after 64 in a row the
            run ends all the same.
    """

    def __init__(self, url: str, *, timeout: float, vocabulary: TeacherVocabulary, drop: bool = False) -> None:
        self._service = Service(generate_url(url), timeout=timeout)
        self._vocabulary = vocabulary
        self._drop = drop
        self._failed_in_a_row = 0

    async def __call__(self, sample: Sample) -> None:
        """Set ``sample.teacher_log_probs``; nothing is done where they are set, or where the sample failed.

        Raises:
            TeacherError: The teacher gave none.
            DataError: The sample has a response and no prompt token, so nothing predicts its first one.
        """
        if sample.teacher_log_probs is not None or sample.status is Status.FAILED:
            return
        try:
            sample.teacher_log_probs = await self._score(sample)
        except TeacherError as error:
            self._failed_in_a_row += 1
            if not self._drop or self._failed_in_a_row >= REQUESTS:
                raise
            sample.metadata[FAILURE_KEY] = str(error)
            sample.remove_sample = True
            logger.warning("sample %d is not trained on: %s", sample.index, error)
        else:
            self._failed_in_a_row = 0
            failures.withdraw(sample, FAILURE_KEY)

    async def _score(self, sample: Sample) -> list[float]:
        if not sample.response_length:
            return []
        start = len(sample.tokens) - sample.response_length - 1
        where = f"sample {sample.index} of {len(sample.tokens)} tokens"
        if start < 0:
            raise DataError(f"{where}: a response without a prompt token, so nothing predicts its first token")
        if (beyond := max(sample.tokens)) > self._vocabulary.largest:
            raise TeacherError(
                f"{where} has the token {beyond}, and the teacher knows none above {self._vocabulary.largest}; "
                "take a teacher of the same vocabulary, or --rm-on-failure drop"
            )
        try:
            reply = await self._service.ask(request(sample.tokens, start))
        except HttpError as error:
            raise TeacherError(f"{where}: {_refusal(error)}") from error
        try:
            return read_log_probs(reply, sample.tokens[start:], self._vocabulary)
        except TeacherError as error:
            raise TeacherError(f"{where}: the teacher at {self._service.url} {error}") from None


def generate_url(url: str) -> str:
    """The address that is asked, for a server's address with or without ``/generate``."""
    return url.rstrip("/").removesuffix("/generate").rstrip("/") + "/generate"


def request(tokens: list[int], start: int, **more: Any) -> dict[str, Any]:
    """What SGLang is asked: log-probs of the tokens behind place ``start``, each given all before it."""
    return {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start,
        **more,
    }


def read_log_probs(reply: Any, tokens: list[int], vocabulary: TeacherVocabulary) -> list[float]:
    """The log-probs in SGLang's answer, if it is about exactly these tokens.

    Args:
        reply: Answer to :func:`request`.
        tokens: The tokens from place ``start`` on. The first is there only because SGLang's list begins with it,
            without a value.
        vocabulary: What the teacher was found to know.

    Returns:
        The values of all tokens but the first, in nats.

    Raises:
        TeacherError: It has another form, is about other tokens, or lacks a value.
    """
    try:
        entries = [(entry[0], entry[1]) for entry in reply["meta_info"]["input_token_logprobs"]]
    except (KeyError, TypeError, IndexError) as error:
        raise TeacherError(
            f"answered in an unknown form ({type(error).__name__}: {error}): {repr(reply)[:SHOWN_CHARACTERS]}; "
            "it must be a SGLang server, or sglang-router"
        ) from error
    if len(entries) != len(tokens):
        raise TeacherError(f"answered about {len(entries)} tokens instead of {len(tokens)}")
    for place, ((_, shown), token) in enumerate(zip(entries, tokens, strict=True)):
        if not vocabulary.may_be_shown_as(token, shown):
            raise TeacherError(f"answered about token {shown!r} in the place of token {token} ({place} from the start)")
    values = [value for value, _ in entries[1:]]
    for place, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
            raise TeacherError(f"gave {value!r} as the log-prob of token {tokens[place + 1]} ({place} of the response)")
    return [float(value) for value in values]


def said(error: HttpError) -> str:
    """A failed request in a few words: ``HTTP 400: …`` or ``no answer: …``, on one line."""
    answer = "no answer" if error.status is None else f"HTTP {error.status}"
    return f"{answer}: {' '.join(error.body.split())[:SHOWN_CHARACTERS]}"


def _refusal(error: HttpError) -> str:
    if error.may_pass:
        return (
            f"the teacher at {error.url} failed {ATTEMPTS} times, at last with {said(error)}; look at its log, raise "
            "--rm-timeout, or leave such samples out with --rm-on-failure drop"
        )
    return (
        f"the teacher at {error.url} refused it ({said(error)}); where it is too long, raise the teacher's "
        "--context-length, lower --rollout-max-response-len, or choose --rm-on-failure drop"
    )
