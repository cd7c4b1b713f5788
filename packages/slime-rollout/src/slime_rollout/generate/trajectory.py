"""An interaction of several turns, recorded token by token: what the model wrote is never tokenized again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from slime_core.types import Message, Sample, Status
from slime_rollout.data.continuation import ChatTurns, as_messages
from slime_rollout.errors import GenerationError
from slime_rollout.generate.completion import Completion
from slime_rollout.generate.context import GenerationContext
from slime_rollout.generate.hook_call import current
from slime_rollout.generate.sampling import DISTRIBUTION

TURNS_KEY = "turns"
"""Entry of a sample's metadata: how many turns the model has had."""


class Trajectory:
    """The model's turns and what it is shown between them, on one sample.

    >>> async def custom_generate(args, sample, sampling_params):
    ...     trajectory = Trajectory.start(sample)
    ...     while not trajectory.done:
    ...         expression = find_call(await trajectory.generate())
    ...         if expression is None:
    ...             break
    ...         trajectory.observe(f"<result>{calculate(expression)}</result>")
    ...     return sample

    Turns are sampled with a seed of their own each, and trained on; their log-probs and weight versions are the
    engine's. What is observed has loss mask 0. Both count towards the longest response and the longest context.
    ``sample.metadata["turns"]`` counts the turns.

    Args:
        sample: Fresh; or ``ABORTED``, and then its last turn goes on first.
        context: Where requests go, and how tokens are drawn.
        max_turns: Most turns of the model; by default ``--max-turns``.

    Attributes:
        sample: The sample; up to date after each call.
        last: What the engine said in the last turn; ``None`` before the first.
    """

    def __init__(self, sample: Sample, context: GenerationContext, *, max_turns: int | None = None) -> None:
        self.sample = sample
        self.last: Completion | None = None
        self._context = context
        self._max_turns = getattr(context.args, "max_turns", None) if max_turns is None else max_turns
        self._no_more = False
        self._goes_on = sample.status is Status.ABORTED
        self._before = copy.deepcopy(as_messages(sample.prompt))
        if sample.status is not Status.ABORTED:
            if sample.response_length:
                raise GenerationError(f"sample {sample.index} has a response; a trajectory begins with a prompt")
            sample.metadata[TURNS_KEY] = 0
        if not sample.tokens:
            raise GenerationError(
                f"sample {sample.index} has chat messages and no tokens; add --apply-chat-template, set sample.tokens "
                "before the trajectory begins, or use generate_single"
            )
        if sample.session_id is None:  # the engine that has the sample's tokens in its cache
            sample.session_id = f"{context.stream}-{context.run_seed}-{sample.index}"

    @classmethod
    def start(cls, sample: Sample | None = None, *, max_turns: int | None = None) -> Trajectory:
        """The trajectory of a sample, from inside a custom generate function.

        Args:
            sample: By default the one that the function was called with.
            max_turns: Most turns of the model; by default ``--max-turns``.

        Raises:
            GenerationError: No custom generate function runs here, it got several samples, or the sample has a
                response that is not to go on.
        """
        call = current()
        return cls(call.sample if sample is None else sample, call.context, max_turns=max_turns)

    @property
    def turns(self) -> int:
        """How many turns the model has had, one that was cut off included."""
        return int(self.sample.metadata.get(TURNS_KEY, 0))

    @property
    def room(self) -> int:
        """How many tokens the response may still grow by."""
        params, sample = self._context.params, self.sample
        room = params.max_new_tokens - sample.response_length
        if params.max_context is not None:
            room = min(room, params.max_context - len(sample.tokens))
        return max(room, 0)

    @property
    def done(self) -> bool:
        """Whether there can be no further turn: no turn or no room is left, or the rollout was told to stop."""
        if self.sample.status is Status.ABORTED:
            return not self._goes_on
        return self._no_more or self.room == 0 or (self._max_turns is not None and self.turns >= self._max_turns)

    async def generate(self, **changes: Any) -> str:
        """The model's next turn, or the rest of one that was cut off.

        Where :attr:`done` says that there is none, nothing is asked, and the sample is ``TRUNCATED``. Where the rollout
        was told to stop (it has enough samples), the sample is ``ABORTED``: return it as it is.

        Args:
            **changes: Sampling settings of this turn, by SGLang's names, such as ``stop=["</call>"]`` and
                ``max_new_tokens``, which counts for no more than the room there is. Those that change the distribution,
                such as ``temperature``, only in evaluation: the trainer takes every token from one distribution.

        Returns:
            The whole turn as text, without special tokens; with the stop string that ended it.

        Raises:
            GenerationError: See :meth:`EngineClient.generate`; or the tokens would be trained on, and ``changes`` have
                them drawn from another distribution than the rollout's.
        """
        sample = self.sample
        usual = self._context.params.to_request(0)
        other = [name for name in DISTRIBUTION & changes.keys() if changes[name] != usual.get(name)]
        if other and not self._context.evaluation:
            raise GenerationError(
                f"generate({', '.join(f'{name}={changes[name]!r}' for name in sorted(other))}) draws this turn from "
                "another distribution than the one that is trained, which is allowed in evaluation only; leave it out, "
                "or set it for the whole run, such as --rollout-temperature"
            )
        if self.done:
            if sample.status is not Status.ABORTED:
                sample.status = Status.TRUNCATED
            return ""
        goes_on, self._goes_on = self._goes_on, False
        turn = max(self.turns - 1, 0) if goes_on else self.turns
        begun = _sampled_at_end(sample) if goes_on else 0
        before = self._text_before(begun)
        room = min(self.room, int(changes.pop("max_new_tokens", self.room)))
        if self._context.stop.is_set():
            sample.status = Status.ABORTED
        elif room > 0:
            request = self._context.params.to_request(self._context.seed(sample, turn), max_new_tokens=room) | changes
            self.last = await self._context.client.generate(sample.tokens, request, session_id=sample.session_id)
            self._record(self.last)
            begun += len(self.last.tokens)
        else:  # what was cut off had just filled the room
            sample.status = Status.TRUNCATED
        sample.metadata[TURNS_KEY] = turn + 1
        text = self._decode(sample.response_tokens[sample.response_length - begun :])
        sample.response = before + text
        return text

    def observe(self, content: str | Sequence[int]) -> None:
        """Show the model something: it is added to the response, and not trained on.

        What no turn can follow, because no turn or not enough room is left, is not added: the sample is then
        ``TRUNCATED`` and the trajectory :attr:`done`.

        Args:
            content: Text, tokenized by itself without special tokens; or token ids.
        """
        if isinstance(content, str):
            self._observe(self._tokenizer()(content, add_special_tokens=False)["input_ids"], content)
        else:
            self._observe(list(content), self._decode(list(content)))

    def observe_messages(self, messages: Sequence[Message]) -> None:
        """Show the model chat messages, such as ``{"role": "tool", "content": "42"}``, as its template writes them.

        That is the end of the model's turn, if it did not write it itself, the messages, and the beginning of the
        model's next turn. Counts as :meth:`observe` does.

        Raises:
            GenerationError: The template refuses the messages, or does not show where a turn ends.
        """
        sample = self.sample
        chat = ChatTurns(self._tokenizer(), self._context.args)
        last_token = sample.tokens[-1] if sample.response_length else None
        tokens = chat.continuation(self._before, messages, last_token=last_token, tools=sample.metadata.get("tools"))
        self._observe(tokens, self._decode(tokens))

    def _observe(self, tokens: list[int], text: str) -> None:
        if self.sample.status is Status.ABORTED:
            return  # the turn is not over
        if self.done or len(tokens) >= self.room:
            self._no_more = True
            self.sample.status = Status.TRUNCATED
            return
        self.sample.append_response(tokens, text=text, trained=False)

    def _record(self, done: Completion) -> None:
        sample = self.sample
        if done.tokens:
            sample.append_response(done.tokens, log_probs=done.log_probs, weight_version=done.weight_versions)
        elif sample.rollout_log_probs is None:
            sample.rollout_log_probs = [0.0] * sample.response_length
        sample.status = done.status

    def _text_before(self, begun: int) -> str:
        """The response as text without its last ``begun`` tokens, the beginning of a turn."""
        sample = self.sample
        return sample.response.removesuffix(self._decode(sample.response_tokens[-begun:])) if begun else sample.response

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer().decode(list(tokens), skip_special_tokens=True))

    def _tokenizer(self) -> Any:
        if self._context.tokenizer is None:
            raise GenerationError("a trajectory needs the model's tokenizer, and this context has none")
        return self._context.tokenizer


def _sampled_at_end(sample: Sample) -> int:
    """How many tokens at the end an engine sampled without anything observed between them."""
    versions = sample.weight_versions
    return next((count for count, version in enumerate(reversed(versions)) if version < 0), len(versions))
