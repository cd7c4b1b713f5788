"""Rewards from a service: one POST per sample."""

from __future__ import annotations

import math
from typing import Any

from slime_core.interfaces import RewardValue
from slime_core.types import Sample
from slime_rollout.errors import RewardError, VerifierError
from slime_rollout.http import HttpError
from slime_rollout.rewards.answers import last_boxed
from slime_rollout.service import Service


class RemoteReward:
    r"""Sends ``{"prompt", "response", "label"}`` as JSON; the answer is a number, or an object of numbers.

    Refused connections, 408, 429 and 5xx are tried four times in all; any other 4xx ends the run, for every sample
    would get it.

    Args:
        url: Address of the service.
        timeout: Time limit of one attempt, in seconds.
        boxed: Send as response what the last ``\boxed{…}`` holds: nothing where there is none.
    """

    def __init__(self, url: str, *, timeout: float, boxed: bool = False) -> None:
        self._service = Service(url, timeout=timeout)
        self._boxed = boxed

    async def __call__(self, sample: Sample) -> RewardValue:
        """The service's value.

        Raises:
            VerifierError: It answered with an error of its own, with something that is no reward, or not at all.
            RewardError: It refused the request.
        """
        response = last_boxed(sample.response) or "" if self._boxed else sample.response
        payload = {"prompt": sample.prompt, "response": response, "label": sample.label}
        try:
            return _reward(await self._service.ask(payload), self._service.url)
        except HttpError as error:
            if error.may_pass:
                raise VerifierError(str(error)) from error
            raise RewardError(f"--rm-url refused sample {sample.index}: {error}") from error


def _reward(answer: Any, url: str) -> RewardValue:
    entries = answer if isinstance(answer, dict) else {"": answer}
    if not entries or not all(
        isinstance(entry, int | float) and abs(entry) <= 1e300 and math.isfinite(entry) for entry in entries.values()
    ):
        raise VerifierError(f"{url} answered {str(answer)[:200]!r}, not a finite number or an object of them")
    return {str(key): float(entry) for key, entry in answer.items()} if isinstance(answer, dict) else float(answer)
