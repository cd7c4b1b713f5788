"""Engines' log-probs of a few fixed tokens: after an update of weights they must be the trainer's."""

from __future__ import annotations

import dataclasses
import logging
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slime_core.errors import SlimeError
from slime_rollout.http import HttpError, call
from slime_rollout.teacher import request

logger = logging.getLogger(__name__)

SEQUENCES, LENGTH, DECODED = 1, 24, 3
_SEED, _TIMES = 20, 4
# Added to a logit (nats), so that a greedy engine takes this token. Others keep log-probs that are precise down to
# _LEAST: SGLang may compute them as log(softmax) in fp32.
_BIAS, _LEAST = 40.0, -85.0
_ADVICE = "use a SGLang that has input log-probs, or compare none with --weight-canary-limit 0"


class CanaryError(SlimeError):
    """An engine cannot say what it makes of tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CanaryTokens:
    """Fixed tokens: those that an engine reads, and those that it decodes.

    An engine computes some weights again for decoding, such as the halves of MLA's up-projection, so both ways are
    looked at. What it is made to decode has another probability there; how far two others are from each other does not
    change.
    """

    rows: Sequence[Sequence[int]]  # tokens that are read, at least one list
    decoded: int  # the token that is decoded again and again after the first list, DECODED times
    pair: tuple[int, int]  # two tokens that may follow it each time

    @classmethod
    def of(cls, vocab_size: int, *, experts: int = 1, chosen: int = 1) -> CanaryTokens:
        """Rows from the whole vocabulary but its last token, SGLang's placeholder of an image; more for many experts.

        A token goes to ``chosen`` of the ``experts``: each has four tokens on average, and nearly all have one.
        """
        dice = random.Random(_SEED)
        count = max(SEQUENCES, math.ceil(_TIMES * experts / chosen / LENGTH))
        rows = [[dice.randrange(max(vocab_size - 1, 1)) for _ in range(LENGTH)] for _ in range(count)]
        decoded, one, other = dice.sample(range(vocab_size - 1), 3)
        return cls(rows=rows, decoded=decoded, pair=(one, other))

    @property
    def continuations(self) -> list[list[int]]:
        """The continuations of the first row: the decoded tokens up to each time, and one of the pair."""
        times = range(1, DECODED + 1)
        return [[*[self.decoded] * count, token] for count in times for token in self.pair]

    def distance(self, ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, str]:
        """The larger distance (nats) of reading and decoding, and which it is: a mean over tokens that are read, and a
        median over those that are decoded, few as they are, as an expert chosen by rounding may move one.

        Log-probs are of all tokens of ``rows`` but each first, then of the last of each of :attr:`continuations`, which
        may be missing in ``theirs``. The distance is infinite where a number is missing or not finite.
        """
        read = sum(len(row) - 1 for row in self.rows)
        found = [(_summary(statistics.fmean, ours[:read], theirs[:read]), "reading")]
        if len(theirs) != read:
            found.append(
                (_summary(statistics.median, _within_pairs(ours[read:]), _within_pairs(theirs[read:])), "decoding")
            )
        return max(found)


def _summary(of: Callable[[list[float]], float], ours: Sequence[float], theirs: Sequence[float]) -> float:
    if len(ours) != len(theirs) or not ours:
        return math.inf
    apart = [abs(one - other) for one, other in zip(ours, theirs, strict=True)]
    return of(apart) if all(map(math.isfinite, apart)) else math.inf


def _within_pairs(values: Sequence[float]) -> list[float]:
    return [(one - other) / 2 for one, other in zip(values[::2], values[1::2], strict=False)]


class EngineCanary:
    """Asks engines for their log-probs. ``key`` is what they ask for, ``timeout`` the limit of a request in seconds."""

    def __init__(self, *, key: str | None, timeout: float) -> None:
        self._key, self._timeout = key, timeout
        self._known: dict[str, Mapping[str, Any]] = {}

    def __call__(self, urls: Sequence[str], tokens: CanaryTokens) -> dict[str, list[float]]:
        """Log-probs (nats) by engine, in the order of :meth:`CanaryTokens.distance`.

        Left out are engines that only prefill or only decode, which answer nothing without the other kind, and, with a
        line in the log, those that do not answer: whoever watches the engines sees that, too. Those that decode
        speculatively only read: they may decode several tokens at once. Raises `CanaryError` if an engine refuses, or
        answers in another form.
        """
        with ThreadPoolExecutor(max(1, len(urls))) as pool:
            found = list(pool.map(lambda url: self._ask(url, tokens), urls))
        return {url: values for url, values in zip(urls, found, strict=True) if values is not None}

    def _ask(self, url: str, tokens: CanaryTokens) -> list[float] | None:
        try:
            if url not in self._known:
                info = call("GET", f"{url}/server_info", key=self._key, attempts=3)
                self._known[url] = info if isinstance(info, Mapping) else {}
            if self._known[url].get("disaggregation_mode") not in (None, "null"):
                return None
            decodes = not self._known[url].get("speculative_algorithm")
            answers = call("POST", f"{url}/generate", _body(tokens, decodes), key=self._key, timeout=self._timeout)
        except HttpError as error:
            if error.status is None:
                logger.warning("weights of %s are not compared with the trainer's: %s", url, error)
                return None
            raise CanaryError(f"{url} gives no log-probs of tokens: {error}; {_ADVICE}") from error
        if not isinstance(answers, list) or len(answers) != len(tokens.rows):
            raise CanaryError(f"{url} gives no log-probs of tokens: {str(answers)[:200]}; {_ADVICE}")
        found = [value for row, one in zip(tokens.rows, answers, strict=True) for value in _read(url, row, one)]
        return found + (_decoded(url, tokens, answers[0]) if decodes else [])


def _body(tokens: CanaryTokens, decodes: bool) -> dict[str, Any]:
    rows = [list(row) for row in tokens.rows]
    if not decodes:
        return request(rows, 0)
    sampling = {
        "max_new_tokens": DECODED + 1,
        "temperature": 0.0,
        "ignore_eos": True,
        "logit_bias": {str(tokens.decoded): _BIAS},
    }
    return request(rows, 0, sampling_params=sampling, token_ids_logprob=list(tokens.pair))


def _read(url: str, row: Sequence[int], answer: Any) -> list[float]:
    entries = _entries(url, answer, "input_token_logprobs")
    if [token for _, token in entries] != list(row):
        raise CanaryError(f"{url} gives log-probs of other tokens than it was asked about; {_ADVICE}")
    return [value for value, _ in entries[1:]]


def _decoded(url: str, tokens: CanaryTokens, answer: Any) -> list[float]:
    """The pair's log-probs each time; none where logits are so far apart that the bias cannot tell.

    Whatever is not finite is given: it is never left out.
    """
    taken = _entries(url, answer, "output_token_logprobs")[:DECODED]
    found: list[float] = []
    for place in range(1, DECODED + 1):
        value = {token: value for value, token in _entries(url, answer, "output_token_ids_logprobs", place)}
        found += [value.get(token, math.nan) for token in tokens.pair]
    if not all(math.isfinite(value) for value in (*found, *(value for value, _ in taken))):
        return [math.nan] * len(found)
    is_right = [token for _, token in taken] == [tokens.decoded] * DECODED
    return found if is_right and min(found) >= _LEAST else []


def _entries(url: str, answer: Any, *path: str | int) -> list[tuple[float, int]]:
    """Log-probs, NaN where there is none, and their tokens."""
    try:
        found = answer["meta_info"]
        for part in path:
            found = found[part]
        entries = [(entry[0], entry[1]) for entry in found]
    except (KeyError, TypeError, IndexError) as error:
        raise CanaryError(f"{url} gives no log-probs of tokens: {str(answer)[:200]}; {_ADVICE}") from error
    return [(float(value) if isinstance(value, int | float) else math.nan, token) for value, token in entries]
