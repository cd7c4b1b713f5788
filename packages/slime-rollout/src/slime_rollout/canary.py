"""What engines make of a few fixed tokens: after an update of weights, it must be what the trainer makes of them."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slime_core.errors import SlimeError
from slime_rollout.http import HttpError, call
from slime_rollout.teacher import request

logger = logging.getLogger(__name__)

SEQUENCES, LENGTH = 1, 24
_SEED, _TIMES = 20, 4
_ADVICE = "use a SGLang that has input log-probs, or compare none with --weight-canary-limit 0"
Rows = Sequence[Sequence[int]]


class CanaryError(SlimeError):
    """An engine cannot say what it makes of tokens."""


def canary_rows(vocab_size: int, *, experts: int = 1, chosen: int = 1) -> list[list[int]]:
    """Fixed tokens, drawn from the whole vocabulary: SEQUENCES rows of LENGTH, more for a model with many experts.

    With ``chosen`` of ``experts`` for each token, an expert is chosen four times on average, so that few have no part.
    The vocabulary's last token is left out, which SGLang takes for the placeholder of an image.
    """
    dice = random.Random(_SEED)
    rows = max(SEQUENCES, math.ceil(_TIMES * experts / chosen / LENGTH))
    return [[dice.randrange(max(vocab_size - 1, 1)) for _ in range(LENGTH)] for _ in range(rows)]


class EngineCanary:
    """Asks engines for their log-probs. ``key`` is what they ask for, ``timeout`` the limit of a request in seconds."""

    def __init__(self, *, key: str | None, timeout: float) -> None:
        self._key, self._timeout = key, timeout
        self._whole: dict[str, bool] = {}

    def __call__(self, urls: Sequence[str], rows: Rows) -> dict[str, list[float]]:
        """Log-probs (nats) of all tokens of ``rows`` but each first, by engine.

        Engines that only prefill or only decode are left out: they answer nothing without the other kind.

        Raises:
            CanaryError: An engine refuses, or answers in another form. One that does not answer is logged and left out:
                whoever watches the engines sees that, too.
        """
        with ThreadPoolExecutor(max(1, len(urls))) as pool:
            found = list(pool.map(lambda url: self._ask(url, rows), urls))
        return {url: values for url, values in zip(urls, found, strict=True) if values is not None}

    def _ask(self, url: str, rows: Rows) -> list[float] | None:
        try:
            if url not in self._whole:
                info = call("GET", f"{url}/server_info", key=self._key, attempts=3)
                self._whole[url] = not isinstance(info, Mapping) or info.get("disaggregation_mode") in (None, "null")
            if not self._whole[url]:
                return None
            body = request([list(row) for row in rows], 0)
            answers = call("POST", f"{url}/generate", body, key=self._key, timeout=self._timeout)
        except HttpError as error:
            if error.status is None:
                logger.warning("weights of %s are not compared with the trainer's: %s", url, error)
                return None
            raise CanaryError(f"{url} gives no log-probs of tokens: {error}; {_ADVICE}") from error
        return [value for row, answer in zip(rows, answers, strict=True) for value in _values(url, row, answer)]


def _values(url: str, row: Sequence[int], answer: Any) -> list[float]:
    try:
        entries = [(entry[0], entry[1]) for entry in answer["meta_info"]["input_token_logprobs"]]
    except (KeyError, TypeError, IndexError) as error:
        raise CanaryError(f"{url} gives no log-probs of tokens: {str(answer)[:200]}; {_ADVICE}") from error
    if [token for _, token in entries] != list(row):
        raise CanaryError(f"{url} gives log-probs of other tokens than it was asked about; {_ADVICE}")
    return [float(value) if isinstance(value, int | float) else math.nan for value, _ in entries[1:]]


def distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The mean of |ours - theirs|; infinite where a number is missing or not finite."""
    if len(ours) != len(theirs) or not ours:
        return math.inf
    mean = math.fsum(abs(one - other) for one, other in zip(ours, theirs, strict=True)) / len(ours)
    return mean if math.isfinite(mean) else math.inf
