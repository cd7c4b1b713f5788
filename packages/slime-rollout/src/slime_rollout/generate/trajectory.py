"""For custom generate functions: an interaction of several turns, recorded token by token.

What the model wrote is never tokenized again.

A function drives a `Trajectory`, or asks `generate_single` for the next message of a conversation. Functions written
for other systems find a `post` and the tokenizer here.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from slime_core.former_names import former_attribute
from slime_core.hooks import HookArgs
from slime_core.types import Message, Prompt, Sample, Status
from slime_rollout.data.chat import ChatTurns, as_messages, encode_text
from slime_rollout.engine.addresses import key_for
from slime_rollout.errors import GenerationError
from slime_rollout.generate.completion import Completion
from slime_rollout.generate.context import DISTRIBUTION, GenerationContext
from slime_rollout.generate.custom import HookCall, current
from slime_rollout.generate.turn_log import as_json
from slime_rollout.http import HttpError, excerpt, exchange, make_session

logger = logging.getLogger(__name__)

TURNS_KEY = "turns"
"""Entry of a sample's metadata: how many turns the model has had."""


class Trajectory:
    """The model's turns and what it is shown between them, as one sample.

    >>> async def custom_generate(args, sample, sampling_params):
    ...     trajectory = Trajectory.start(sample)
    ...     while not trajectory.done:
    ...         expression = find_call(await trajectory.generate())
    ...         if expression is None:
    ...             break
    ...         trajectory.observe(f"<result>{calculate(expression)}</result>")
    ...     return sample

    Each turn is sampled with its own seed and trained on; log-probs and weight versions are the engine's. What is
    observed has loss mask 0. Both count towards the longest response and the longest context.
    ``sample.metadata["turns"]`` counts the turns.

    Args:
        sample: Without a response; or ``ABORTED``, and then its last turn is continued first.
        context: Where requests go, and how tokens are drawn.
        max_turns: Most turns of the model; by default ``--max-turns``.

    Attributes:
        sample: The sample; up to date after each call.
        last: What the engine sampled in the last turn; ``None`` before the first.
        messages: The chat messages that the model's turn answers, for `observe_messages`.
    """

    def __init__(self, sample: Sample, context: GenerationContext, *, max_turns: int | None = None) -> None:
        self.sample = sample
        self.last: Completion | None = None
        self._context = context
        self._max_turns = getattr(context.args, "max_turns", None) if max_turns is None else max_turns
        self._no_more = False
        self._answered = False  # whether messages came since the model's turn
        self._goes_on = sample.status is Status.ABORTED
        self.messages = copy.deepcopy(as_messages(sample.prompt))
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
        """The trajectory of a sample, by default the only one that the custom generate function was called with.

        Raises:
            GenerationError: No custom generate function runs, it got several samples, or the sample has a response.
        """
        call = current()
        return cls(call.sample if sample is None else sample, call.context, max_turns=max_turns)

    @property
    def turns(self) -> int:
        """Turns of the model so far, including one that was cut off."""
        return int(self.sample.metadata.get(TURNS_KEY, 0))

    room = former_attribute("room", "tokens_left")

    @property
    def tokens_left(self) -> int:
        """How many tokens the response may still grow by."""
        return self._context.tokens_left(self.sample)

    @property
    def done(self) -> bool:
        """Whether no further turn can follow: no turn or no token is left, or the rollout is to stop."""
        if self.sample.status is Status.ABORTED:
            return not self._goes_on
        return self._no_more or self.tokens_left == 0 or (self._max_turns is not None and self.turns >= self._max_turns)

    async def generate(self, **changes: Any) -> str:
        """The model's next turn, or the rest of one that was cut off.

        If :attr:`done`, nothing is sampled and the sample is ``TRUNCATED``. If the rollout has enough samples and is
        to stop, the sample is ``ABORTED``: return it unchanged.

        Args:
            **changes: Sampling settings of this turn, by SGLang's names, such as ``stop=["</call>"]`` and
                ``max_new_tokens``. Those that change the distribution, such as ``temperature``, only in evaluation:
                the trainer computes one distribution for all tokens.

        Returns:
            The whole turn as text, without special tokens (but with ``--no-rollout-skip-special-tokens``); with the
            token that completed a stop string.

        Raises:
            GenerationError: See :meth:`EngineClient.generate`; or ``changes`` need evaluation.
        """
        sample = self.sample
        self._answered = False
        self._check_distribution(changes)
        if self.done:
            if sample.status is not Status.ABORTED:
                sample.status = Status.TRUNCATED
            return ""
        goes_on, self._goes_on = self._goes_on, False
        turn = max(self.turns - 1, 0) if goes_on else self.turns
        begun = _sampled_at_end(sample) if goes_on else 0
        before = sample.response.removesuffix(self._text_at_end(begun)) if begun else sample.response
        most = min(self.tokens_left, int(changes.pop("max_new_tokens", self.tokens_left)))
        if self._context.stop.is_set():
            sample.status = Status.ABORTED
        elif most > 0:
            request = self._context.request(sample, turn, most=most, changes=changes)
            self.last = done = await self._context.next_turn(sample, request, begun)
            if done.tokens:
                done.append_to(sample)
            elif sample.rollout_log_probs is None:
                sample.rollout_log_probs = [0.0] * sample.response_length
            sample.status = done.status
            begun += len(done.tokens)
        else:  # what was cut off was as long as it may be
            sample.status = Status.TRUNCATED
        sample.metadata[TURNS_KEY] = turn + 1
        text = self._text_at_end(begun)
        sample.response = before + text
        return text

    def observe(self, content: str | Sequence[int]) -> None:
        """Show the model text, tokenized by itself without special tokens, or token ids.

        They are added to the response, and not trained on. If no turn can follow, because no turn or too few tokens are
        left, they are not added: the sample is then ``TRUNCATED`` and the trajectory :attr:`done`.
        """
        if isinstance(content, str):
            self._observe(encode_text(self._tokenizer(), content))
        else:
            self._observe(list(content))

    def observe_messages(self, messages: Sequence[Message]) -> None:
        """:meth:`observe` chat messages, such as ``{"role": "tool", "content": "42"}``, as the template writes them.

        It writes the end of the model's turn, if the model did not, the messages, and the beginning of the next turn.
        Give all messages between two turns at once, such as the results of several tools: those of a second call stand
        behind a turn of the model without a word, which is logged.

        Raises:
            DataError: The template is missing, refuses the messages, or leaves out what the model writes.
        """
        sample = self.sample
        if self._answered:
            _say_empty_turn()
        self._answered = True
        chat = ChatTurns(self._tokenizer(), self._context.args)
        last_token = sample.tokens[-1] if sample.response_length else None
        tokens = chat.continuation(self.messages, messages, last_token=last_token, tools=sample.metadata.get("tools"))
        self._observe(tokens)

    def _observe(self, tokens: list[int]) -> None:
        if self.sample.status is Status.ABORTED:
            return  # the turn is not over
        if self.done or len(tokens) >= self.tokens_left:
            self._no_more = True
            self.sample.status = Status.TRUNCATED
            return
        text = self._context.text_of(tokens, self.sample.tokens)
        self.sample.append_response(tokens, text=text, trained=False)

    def _check_distribution(self, changes: dict[str, Any]) -> None:
        usual = self._context.params.to_request(0)
        other = [name for name in DISTRIBUTION & changes.keys() if changes[name] != usual.get(name)]
        if other and not self._context.evaluation:
            raise GenerationError(
                f"generate({', '.join(f'{name}={changes[name]!r}' for name in sorted(other))}) draws this turn from "
                "another distribution than the one that is trained, which is allowed in evaluation only; leave it out, "
                "or set it for the whole run, such as --rollout-temperature"
            )

    def _text_at_end(self, count: int) -> str:
        """The last ``count`` tokens as text."""
        tokens, start = self.sample.tokens, len(self.sample.tokens) - count
        return self._context.text_of(tokens[start:], tokens[:start])

    def _tokenizer(self) -> Any:
        if self._context.tokenizer is None:
            raise GenerationError("a trajectory needs the model's tokenizer, and this context has none")
        return self._context.tokenizer


@functools.cache
def _say_empty_turn() -> None:
    """Once in a process."""
    logger.warning(
        "observe_messages was called again before the model's next turn, so the template writes a turn without a word "
        "between the messages; give all of them in one call"
    )


async def generate_single(conversation: Prompt, *, sample: Sample | None = None, **changes: Any) -> str:
    """The model's next message in a conversation. For custom generate functions only.

    The sample gets the tokens, log-probs and weight versions of what the model writes. In the next call, what was
    appended to the conversation since is rendered and added with loss mask 0.

    Args:
        conversation: Chat messages, or a text prompt. At first the sample's prompt, or another, which replaces its
            tokens. Later the same, with the model's reply as an ``assistant`` message and at least one more message.
        sample: The sample it belongs to. Needed only by a function for several samples that makes lists of its own, if
            several conversations are equal so far.
        **changes: As for :meth:`Trajectory.generate`.

    Returns:
        What the model wrote, without special tokens; empty if no turn or no token is left, and then the sample is
        ``TRUNCATED``.

    Raises:
        GenerationError: It is not clear which sample this belongs to, or it does not continue the last turn; or as
            :meth:`EngineClient.generate`.
        DataError: As :meth:`Trajectory.observe_messages`.
    """
    call = current()
    owner = sample if sample is not None else _owner(call, conversation)
    if not any(own is owner for own in call.samples):
        raise GenerationError(f"this function was not called with sample {owner.index}")
    talk = call.conversations.get(owner.index)
    if talk is None:
        talk = call.conversations[owner.index] = Conversation(call, owner, conversation)
    messages = as_messages(conversation)
    if talk.seen:
        talk.observe(messages)
    talk.given = conversation
    talk.seen = talk.trajectory.messages = copy.deepcopy(messages)
    talk.reply = await talk.trajectory.generate(**changes)
    return talk.reply


class Conversation:
    """A sample's conversation, as `generate_single` knows it.

    ``given`` is the list or text of the last call, ``seen`` its messages then, and ``reply`` what the model wrote.
    """

    def __init__(self, call: HookCall, sample: Sample, conversation: Prompt) -> None:
        if sample.response_length:
            raise GenerationError(
                f"sample {sample.index} has a response already; generate_single begins with the prompt alone"
            )
        self._sample = sample
        self._replace_prompt(call, conversation)
        self.trajectory = Trajectory(sample, call.context)
        self.given: Prompt = conversation
        self.seen: list[Message] = []
        self.reply = ""

    def continues_in(self, messages: list[Message]) -> bool:
        """Whether messages are these, the model's reply, and more."""
        place = len(self.seen)
        return len(messages) > place and messages[:place] == self.seen and self._is_reply(messages)

    def close(self) -> None:
        """Mark the sample as truncated if the function appended more for the model before it returned."""
        if len(as_messages(self.given)) > len(self.seen) + 1 and self._sample.status is Status.COMPLETED:
            self._sample.status = Status.TRUNCATED

    def observe(self, messages: list[Message]) -> None:
        """Add what was appended since the last call. Raises GenerationError if it does not continue the last turn."""
        where, place = f"the conversation of sample {self._sample.index}", len(self.seen)
        if messages[:place] != self.seen:
            raise GenerationError(
                f"{where} does not continue the last turn: its first {place} messages have changed; append to it, "
                "and keep one conversation for each sample"
            )
        if len(messages) == place or not self._is_reply(messages):
            raise GenerationError(
                f"{where} continues with {str(messages[place : place + 1])[:200]}; first append what generate_single "
                'returned, as {"role": "assistant", "content": …} and unchanged: the tokens are those the model wrote'
            )
        if len(messages) == place + 1:
            raise GenerationError(f"{where} has nothing new for the model; append a message after the assistant's")
        self.trajectory.observe_messages(messages[place + 1 :])

    def _is_reply(self, messages: list[Message]) -> bool:
        message = messages[len(self.seen)]
        return message.get("role") == "assistant" and str(message.get("content") or "").strip() == self.reply.strip()

    def _replace_prompt(self, call: HookCall, conversation: Prompt) -> None:
        sample, prompt = self._sample, call.prompt_of(self._sample)
        same = conversation == prompt or as_messages(conversation) == as_messages(prompt)
        if same and sample.tokens:
            return
        if isinstance(conversation, str):
            raise GenerationError(
                f"generate_single got a text that is not the prompt of sample {sample.index}; give chat messages"
            )
        chat = ChatTurns(call.context.tokenizer, call.context.args)
        sample.tokens = chat.prompt(as_messages(conversation), sample.metadata.get("tools"))


def _sampled_at_end(sample: Sample) -> int:
    """How many tokens an engine sampled after the last observation."""
    versions = sample.weight_versions
    return next((count for count, version in enumerate(reversed(versions)) if version < 0), len(versions))


def _owner(call: HookCall, conversation: Prompt) -> Sample:
    """The sample that a conversation belongs to: by the list's identity, or else by its content."""
    if len(call.samples) == 1:
        return call.samples[0]
    if isinstance(conversation, list):
        for sample in call.samples:
            talk = call.conversations.get(sample.index)
            if sample.prompt is conversation or (talk is not None and talk.given is conversation):
                return sample
    fitting = [sample for sample in call.samples if _fits(call, sample, conversation)]
    if len(fitting) == 1:
        return fitting[0]
    raise GenerationError(
        f"generate_single cannot tell which of {len(call.samples)} samples this conversation belongs to: "
        f"{len(fitting) or 'none'} of them could have it; give sample.prompt itself, or add sample=sample"
    )


def _fits(call: HookCall, sample: Sample, conversation: Prompt) -> bool:
    messages, talk = as_messages(conversation), call.conversations.get(sample.index)
    if talk is None:
        return messages == as_messages(call.prompt_of(sample))
    return bool(talk.continues_in(messages))


async def call_tool(function: Callable[..., Any], *arguments: Any, sample: Sample | None = None, **named: Any) -> Any:
    """A tool's answer: ``function(*arguments, **named)``, awaited if it is async. For generate functions only.

    In a run with ``--save`` the result is written down before it is returned. A run that was killed and continues calls
    the function again for the same sample, and a tool whose result is there is not called a second time. That takes a
    function that does the same where it is told the same: chance must come from ``sample.index``, not from the clock.

    >>> async def custom_generate(args, sample, sampling_params):
    ...     trajectory = Trajectory.start(sample)
    ...     while not trajectory.done:
    ...         query = find_query(await trajectory.generate())
    ...         if query is None:
    ...             break
    ...         trajectory.observe(await call_tool(search, query))
    ...     return sample

    Args:
        function: The tool. What it raises is raised here, and is not written down.
        *arguments: Its arguments, which tell calls apart.
        sample: The sample that it is called for; needed by functions for several samples.
        **named: More of its arguments.

    Returns:
        Its result as JSON has it: tuples are lists.

    Raises:
        GenerationError: The result is not JSON, or it is not clear which sample this is for.
    """
    call = current()
    owner, log = call.sample if sample is None else sample, call.context.turns
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"
    asked: list[Any] = [name, list(arguments), named]
    asked.append(call.count(owner, asked))
    if log is not None and (known := log.tool(owner, asked)) is not None:
        return known[0]
    result = function(*arguments, **named)
    if inspect.isawaitable(result):
        result = await result
    content = as_json(result, f"sample {owner.index}, {name}")
    if log is not None:
        log.add_tool(owner, asked, result)
    return orjson.loads(content)


async def post(url: str, payload: Any, *, timeout: float = 600.0) -> Any:
    """POST JSON to a tool's server, or to the router's ``/generate``, and return the answer's JSON.

    To sample from the engines, :class:`Trajectory` is better: it keeps connections, retries, aborts what was cancelled,
    and checks the reply. Requests to a router of the run carry its key.

    Raises `GenerationError` if no answer comes within ``timeout`` seconds, or it is an error or not JSON.
    """
    try:
        async with make_session(timeout, key=key_for(url)) as session:
            content = await exchange(session, "POST", url, orjson.dumps(payload))
        return orjson.loads(content)
    except HttpError as error:
        how = "failed" if error.status is None else "was refused"
        raise GenerationError(f"POST {url} {how}: {error.problem}") from error
    except orjson.JSONDecodeError as error:
        raise GenerationError(f"POST {url} answered with no JSON: {excerpt(content)}") from error


class GenerateState:
    """The tokenizer, in the place where upstream slime keeps it. Inside a custom generate function only."""

    def __init__(self, args: HookArgs) -> None:
        self.args = args
        self.tokenizer = current().context.tokenizer
