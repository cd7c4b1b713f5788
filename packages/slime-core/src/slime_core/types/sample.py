"""`Sample`: one prompt with one response and all that is known about it."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from slime_core.errors import DataError

Message = dict[str, Any]
Prompt = str | list[Message]


class Status(enum.StrEnum):
    """Where a sample stands."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclasses.dataclass(kw_only=True)
class Sample:
    """One prompt and one response. Mutable, because generate and reward functions fill it in.

    R is the number of response tokens.

    Attributes:
        index: Number of the sample, unique in a run.
        group_index: Number of its group: the samples of one prompt share it.
        trajectory_id: Interaction it belongs to; several training samples may share one. ``None`` means ``index``.
        prompt: Text, or chat messages.
        label: The expected answer, if the data has one.
        tokens: Token ids of prompt and response.
        response: The response as text.
        response_length: R.
        loss_mask: R numbers, 1 where the token is trained on; ``None`` means all.
        rollout_log_probs: R log-probs (nats) under the engine's weights; ``None`` if the engine gave none.
        weight_versions: R numbers: the weight version that sampled each token, -1 for a token no engine sampled.
        reward: A number, or several by name; ``None`` before scoring.
        status: Where the sample stands.
        metadata: The data row's own extra fields, and what hooks add.
    """

    index: int
    group_index: int
    prompt: Prompt
    label: str | None = None
    trajectory_id: int | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    response: str = ""
    response_length: int = 0
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    weight_versions: list[int] = dataclasses.field(default_factory=list)
    reward: float | dict[str, float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.validate()

    @property
    def prompt_tokens(self) -> list[int]:
        """Token ids of the prompt alone."""
        return self.tokens[: len(self.tokens) - self.response_length]

    @property
    def response_tokens(self) -> list[int]:
        """Token ids of the response alone."""
        return self.tokens[len(self.tokens) - self.response_length :]

    @property
    def trained_mask(self) -> list[int]:
        """The loss mask, written out: R numbers."""
        return self.loss_mask if self.loss_mask is not None else [1] * self.response_length

    def scalar_reward(self, key: str | None = None) -> float:
        """The reward as one number.

        Args:
            key: Which entry of a reward given by name.

        Raises:
            DataError: There is no reward yet, or it is a dictionary and ``key`` is not in it.
        """
        if isinstance(self.reward, dict):
            if key is None or key not in self.reward:
                raise DataError(
                    f"sample {self.index}: the reward has the entries {sorted(self.reward)}; "
                    "choose one with --reward-key"
                )
            return float(self.reward[key])
        if self.reward is None:
            raise DataError(f"sample {self.index} has no reward; score it before it is trained on")
        return float(self.reward)

    def validate(self) -> None:
        """Check that the lengths agree.

        Raises:
            DataError: Naming the field and the values.
        """
        if not isinstance(self.prompt, str | list):
            raise DataError(
                f"sample {self.index}: prompt must be a string or chat messages, got {type(self.prompt).__name__}"
            )
        length = self.response_length
        if not 0 <= length <= len(self.tokens):
            raise DataError(
                f"sample {self.index}: response_length {length} is not between 0 and {len(self.tokens)} tokens"
            )
        for name in ("loss_mask", "rollout_log_probs"):
            values = getattr(self, name)
            if values is not None and len(values) != length:
                raise DataError(f"sample {self.index}: {name} has {len(values)} entries, response_length is {length}")
        if self.weight_versions and len(self.weight_versions) != length:
            raise DataError(
                f"sample {self.index}: weight_versions has {len(self.weight_versions)} entries, "
                f"response_length is {length}"
            )
        if self.loss_mask is not None and any(value not in (0, 1) for value in self.loss_mask):
            raise DataError(f"sample {self.index}: loss_mask may hold 0 and 1 only, got {sorted(set(self.loss_mask))}")

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values that JSON can hold."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | {
            "status": self.status.value
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Sample:
        """The reverse of :meth:`to_dict`.

        Raises:
            DataError: A key is unknown or missing, or the status is none.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(values.keys() - names):
            raise DataError(f"a sample has no fields {unknown}; known: {sorted(names)}")
        if missing := sorted({"index", "group_index", "prompt"} - values.keys()):
            raise DataError(f"a sample needs the fields {missing}")
        status = values.get("status", Status.PENDING)
        if status not in list(Status):
            raise DataError(f"sample {values['index']}: status {status!r} is unknown; allowed: {', '.join(Status)}")
        return cls(**{**values, "status": Status(status)})


Group = list[Sample]
