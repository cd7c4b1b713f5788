"""`Sample`: one prompt with one response and all that is known about it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slime_core.errors import DataError
from slime_core.types import checks
from slime_core.types.kept import check_kept, nothing_kept
from slime_core.types.routed import count_routed, routed_rows, routed_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

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

    Checked when it is made and whenever it is written. What is assigned in between is not: :meth:`validate` checks it
    at once. R is the number of response tokens.

    Attributes:
        index: Number of the sample, from 0, unique in a run.
        group_index: Number of its group, from 0: the samples of one prompt share it.
        trajectory_id: Its interaction, from 0; several training samples may share one. ``None`` means ``index``.
        prompt: Text, or chat messages.
        label: The expected answer, if the data has one.
        tokens: Token ids of prompt and response.
        response: The response as text.
        response_length: R.
        loss_mask: R numbers, 1 where the token is trained on; ``None`` means all.
        rollout_log_probs: R log-probs (nats) under the engine's weights; ``None`` if the engine gave none.
        teacher_log_probs: R log-probs (nats) of a teacher, for on-policy distillation; ``None`` without one.
        weight_versions: R numbers: the weight version that sampled each token, -1 for a token no engine sampled.
        kept_tokens: R sets of token ids as text (:mod:`slime_core.types.kept`): what each token was sampled from under
            top-p, top-k or min-p, for the trainer to normalize over; ``None`` where that is the whole vocabulary.
        routed_experts: The experts that the engine chose for the first T of ``tokens``, at most all but one, as text
            (:mod:`slime_core.types.routed`), for the trainer to choose the same. ``None`` if they are unknown.
        reward: A number, or a dictionary: one of its numbers is trained on, and it may hold other values of JSON, such
            as the answer that was found. ``None`` before scoring.
        status: Where the sample stands.
        remove_sample: Train on none of its tokens. Its reward still counts in its group's mean.
        session_id: Requests of one session go to the same engine; ``None`` means no preference.
        metadata: The data row's own extra fields, and what hooks add: plain values that JSON can hold.
        train_metadata: What a custom loss or advantage function wants to know of the sample: plain values.
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
    teacher_log_probs: list[float] | None = None
    weight_versions: list[int] = dataclasses.field(default_factory=list)
    kept_tokens: str | None = None
    routed_experts: str | None = None
    reward: float | dict[str, Any] | None = None
    status: Status = Status.PENDING
    remove_sample: bool = False
    session_id: str | None = None
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    train_metadata: dict[str, Any] = dataclasses.field(default_factory=dict)

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
        """The loss mask, written out: R numbers, all 0 for a sample marked ``remove_sample``."""
        if self.remove_sample:
            return [0] * self.response_length
        return self.loss_mask if self.loss_mask is not None else [1] * self.response_length

    @property
    def trained_tokens(self) -> int:
        """Number of response tokens that are trained on."""
        if self.remove_sample:
            return 0
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    @property
    def trajectory(self) -> int:
        """Number of the trajectory: ``trajectory_id``, or ``index`` where that is ``None``."""
        return self.index if self.trajectory_id is None else self.trajectory_id

    def scalar_reward(self, key: str | None = None) -> float:
        """The reward as one number, of several by name that of ``key``. Raises DataError if there is none."""
        return scalar_reward(self.index, self.reward, key)

    def append_response(
        self,
        tokens: Sequence[int],
        *,
        text: str = "",
        trained: bool = True,
        log_probs: Sequence[float] | None = None,
        weight_version: int | list[int] = -1,
        kept_tokens: str | None = None,
        routed_experts: NDArray[Any] | None = None,
    ) -> None:
        """Add tokens to the response: a turn of the model, or an observation that the model is not trained on.

        Mask, log-probs, weight versions and kept tokens grow with it. Tokens that the engine gave no log-probs for get
        0.0, and those without a set of kept tokens an empty one, which only untrained ones may: of the trained tokens,
        all have log-probs or none has, and all have such a set or none has.

        Args:
            tokens: n token ids.
            text: The same as text.
            trained: Whether the loss counts them.
            log_probs: n log-probs (nats) from the engine.
            weight_version: The version that sampled them, or n versions; -1 if no engine did.
            kept_tokens: n sets, as in the field of that name.
            routed_experts: The rows of all tokens but the last that :attr:`routed_experts` has none of yet.

        Raises:
            DataError: The lengths or types are wrong, or of the trained tokens some have log-probs, or kept tokens, and
                some don't. The sample is then as it was.
        """
        where, count, length = f"sample {self.index}", len(tokens), self.response_length
        if log_probs is not None and len(log_probs) != count:
            raise DataError(f"{where}: {count} tokens to append, but {len(log_probs)} log_probs")
        if not isinstance(text, str):
            raise DataError(f"{where}: text must be a string, got {type(text).__name__}")
        new_tokens = checks.integers(where, "tokens", list(tokens), least=0)
        new_log_probs = None if log_probs is None else checks.numbers(where, "log_probs", list(log_probs))
        versions = _versions(where, weight_version, count)
        if kept_tokens is not None:
            check_kept(where, kept_tokens, count)
        routed = self.routed_experts if routed_experts is None else self._routed(where, routed_experts, count)
        if count:
            had, mask = (self.rollout_log_probs if length else None), self.loss_mask or [1] * length
            had_kept = self.kept_tokens if length else None
            columns = {"log_probs": (had, new_log_probs), "kept_tokens": (had_kept, kept_tokens)}
            self._check_append(where, count, trained=trained, mask=mask, **columns)
            if kept_tokens is not None or had_kept is not None:
                self.kept_tokens = (had_kept or nothing_kept(length)) + (kept_tokens or nothing_kept(count))
            missing = new_log_probs is None and had is None
            self.rollout_log_probs = None if missing else [*(had or [0.0] * length), *(new_log_probs or [0.0] * count)]
            if self.loss_mask is not None or not trained:
                self.loss_mask = [*mask, *([int(trained)] * count)]
            if self.weight_versions or max(versions) != -1:
                self.weight_versions = [*(self.weight_versions or [-1] * length), *versions]
        self.tokens = [*self.tokens, *new_tokens]
        self.response += text
        self.response_length += count
        self.routed_experts = routed

    def _routed(self, where: str, rows_TW: NDArray[Any], count: int) -> str:
        """All rows as text, after ``count`` tokens are appended."""
        import numpy as np

        known = [] if self.routed_experts is None else [routed_rows(where, self.routed_experts)]
        wanted = len(self.tokens) + count - 1
        if sum(map(len, known)) + len(rows_TW) != wanted or any(rows.shape[1:] != rows_TW.shape[1:] for rows in known):
            raise DataError(
                f"{where}: routed_experts is known for {sum(map(len, known))} tokens, and {list(rows_TW.shape)} "
                f"numbers more do not make the rows of {wanted}, all but the last"
            )
        return routed_text(np.concatenate([*known, rows_TW]))

    def _check_append(self, where: str, count: int, *, trained: bool, mask: list[int], **columns: Any) -> None:
        """``columns`` are what the tokens before had, and what is given, by name."""
        if self.teacher_log_probs is not None:
            raise DataError(f"{where}: teacher_log_probs are there already; append first, then ask the teacher")
        for name, (before, given) in columns.items():
            if (any(mask) if given is not None else trained and mask) and (given is None) != (before is None):
                raise DataError(
                    f"{where}: the {count} {'trained' if trained else 'untrained'} tokens to append come "
                    f"{'without' if given is None else 'with'} {name}, unlike those before; "
                    "give them for all trained tokens or for none"
                )

    def validate(self, *, lists: bool = True) -> None:
        """Check every field, and make plain numbers and lists of those that other libraries gave.

        Args:
            lists: Check the numbers in the lists, too, besides their lengths.

        Raises:
            DataError: Naming the field and the values.
        """
        self.index = checks.integer("a sample", "index", self.index, least=0)
        where = f"sample {self.index}"
        self.group_index = checks.integer(where, "group_index", self.group_index, least=0)
        self.response_length = checks.integer(where, "response_length", self.response_length)
        if self.trajectory_id is not None:
            self.trajectory_id = checks.integer(where, "trajectory_id", self.trajectory_id, least=0)
        checks.messages(where, "prompt", self.prompt)
        self._validate_texts(where)
        self.reward = checks.reward(where, self.reward)
        if lists:
            self._validate_lists(where)
        self._validate_lengths(where)

    def _validate_lists(self, where: str) -> None:
        self.tokens = checks.integers(where, "tokens", self.tokens, least=0)
        self.weight_versions = checks.integers(where, "weight_versions", self.weight_versions, least=-1)
        if self.loss_mask is not None:
            self.loss_mask = checks.mask(where, self.loss_mask)
        for name in ("rollout_log_probs", "teacher_log_probs"):
            if (values := getattr(self, name)) is not None:
                setattr(self, name, checks.numbers(where, name, values))

    def _validate_texts(self, where: str) -> None:
        if not isinstance(self.response, str):
            raise DataError(f"{where}: response must be a string, got {type(self.response).__name__}")
        for name, text in (("label", self.label), ("session_id", self.session_id)):
            if not (text is None or isinstance(text, str)):
                raise DataError(f"{where}: {name} must be a string or None, got {text!r} ({type(text).__name__})")
        self.remove_sample = checks.scalar(self.remove_sample)
        if not isinstance(self.remove_sample, bool):
            raise DataError(f"{where}: remove_sample must be true or false, got {self.remove_sample!r}")
        for name, values in (("metadata", self.metadata), ("train_metadata", self.train_metadata)):
            if not isinstance(values, dict):
                raise DataError(f"{where}: {name} must be a dictionary, got {type(values).__name__}")
        status: Any = self.status  # whatever was assigned
        if not isinstance(status, Status):
            try:
                self.status = Status(status)
            except ValueError:
                raise DataError(f"{where}: status {status!r} is unknown; allowed: {', '.join(Status)}") from None

    def _validate_lengths(self, where: str) -> None:
        length = self.response_length
        if not 0 <= length <= len(self.tokens):
            raise DataError(f"{where}: response_length {length} is not between 0 and {len(self.tokens)} tokens")
        for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs", "weight_versions"):
            values = getattr(self, name)
            # No weight versions at all is what a sample has that no engine made.
            if values is not None and len(values) != length and (values or name != "weight_versions"):
                raise DataError(f"{where}: {name} has {len(values)} entries, response_length is {length}")
        if self.kept_tokens is not None:
            check_kept(where, self.kept_tokens, length)
        if self.routed_experts is not None:
            most = max(len(self.tokens) - 1, 0)
            if (count := count_routed(where, self.routed_experts)) > most:
                raise DataError(f"{where}: routed_experts has rows of {count} tokens; at most {most} choose experts")

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, the status as text, unchecked. Lists and dictionaries are not copied."""
        known = vars(self)
        values = {name: known[name] for name in _FIELDS}
        values["status"] = self.status.value
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Sample:
        """The reverse of :meth:`to_dict`.

        Raises:
            DataError: A key is unknown or missing, or the status is none.
        """
        if not values.keys() <= _FIELDS:
            unknown = sorted(map(str, values.keys() - _FIELDS))
            raise DataError(f"a sample has no fields {unknown}; known: {sorted(_FIELDS)}")
        if not values.keys() >= _NEEDED:
            raise DataError(f"a sample needs the fields {sorted(_NEEDED - values.keys())}")
        if cls is not Sample or len(values) < len(_FIELDS):
            return cls(**values)
        sample = cls.__new__(cls)  # nothing is left to a default, and __init__ takes as long as all checks
        vars(sample).update(values)
        sample.__post_init__()
        return sample


# Hooks written for the upstream system say `Sample.Status.COMPLETED`.
Sample.Status = Status  # type: ignore[attr-defined]

_FIELDS = dict.fromkeys(field.name for field in dataclasses.fields(Sample)).keys()
_NEEDED = {"index", "group_index", "prompt"}


def scalar_reward(index: int, reward: float | dict[str, Any] | None, key: str | None) -> float:
    """See :meth:`Sample.scalar_reward`."""
    if isinstance(reward, dict):
        value = None if key is None else reward.get(key)
        if isinstance(value, int | float):
            return float(value)
        raise DataError(f"sample {index}: {_no_number(reward, key)}")
    if reward is None:
        raise DataError(f"sample {index} has no reward; score it before it is trained on")
    return float(reward)


def _no_number(reward: dict[str, Any], key: str | None) -> str:
    """Why a key chooses no number of a reward, and which do."""
    numbers = sorted(name for name, value in reward.items() if isinstance(value, int | float))
    if not numbers:
        return f"no entry of the reward {sorted(reward)} is a number; return one that is"
    if key is None:
        return f"the reward has the entries {numbers}; choose one with --reward-key"
    why = f"the reward's {key} is {reward[key]!r}, which is not a number" if key in reward else ""
    return f"{why or f'the reward has no entry {key!r}'}; its numbers are {numbers}: choose one with --reward-key"


def _versions(where: str, given: int | list[int], count: int) -> list[int]:
    if not isinstance(given, list):
        return [checks.integer(where, "weight_version", given, least=-1)] * count
    if len(given) != count:
        raise DataError(f"{where}: {count} tokens to append, but {len(given)} weight versions")
    return checks.integers(where, "weight_version", given, least=-1)


Group = list[Sample]
