"""`generate_single`: the model's next message in a conversation, recorded on the sample that it belongs to."""

from __future__ import annotations

import copy
from typing import Any

from slime_core.types import Message, Prompt, Sample, Status
from slime_rollout.data.continuation import ChatTurns, as_messages
from slime_rollout.errors import GenerationError
from slime_rollout.generate.hook_call import HookCall, current
from slime_rollout.generate.trajectory import Trajectory


async def generate_single(conversation: Prompt, *, sample: Sample | None = None, **changes: Any) -> str:
    """What the model says next. For custom generate functions only.

    The sample gets the tokens, log-probs and weight versions of what the model writes. Next time, what was appended to
    the conversation after that is rendered and added with loss mask 0; what the model wrote is never tokenized again.

    Args:
        conversation: Chat messages, or a text prompt. At first the sample's prompt, or another, which then replaces
            its tokens. From then on, the same with the model's words as an ``assistant`` message, and at least one
            further message.
        sample: Whose conversation it is. Needed only by a function for several samples that makes a list of its own,
            and where several have said the same so far.
        **changes: Sampling settings of this turn, by SGLang's names.

    Returns:
        What the model wrote, without special tokens; nothing where no turn or no room is left, and then the sample is
        ``TRUNCATED``.

    Raises:
        GenerationError: It is not clear whose conversation this is, it does not go on from the last turn, or the chat
            template cannot; or as :meth:`EngineClient.generate`.
    """
    call = current()
    owner = sample if sample is not None else _owner(call, conversation)
    if not any(own is owner for own in call.samples):
        raise GenerationError(f"sample {owner.index} is none that this function was called with")
    talk = call.conversations.get(owner.index)
    if talk is None:
        talk = call.conversations[owner.index] = Conversation(call, owner, conversation)
    reply: str = await talk.say(conversation, **changes)
    return reply


class Conversation:
    """What is known of a sample's conversation.

    Args:
        call: What the function runs for.
        sample: The sample, without a response.
        conversation: Its first messages, or text.
    """

    def __init__(self, call: HookCall, sample: Sample, conversation: Prompt) -> None:
        if sample.response_length:
            raise GenerationError(
                f"sample {sample.index} has a response already; generate_single begins with the prompt alone"
            )
        self._sample = sample
        self._chat = ChatTurns(call.context.tokenizer, call.context.args)
        self._tools = sample.metadata.get("tools")
        self._replace_prompt(call, conversation)
        self._trajectory = Trajectory(sample, call.context)
        self._given: Prompt = conversation
        self._seen: list[Message] = []
        self._reply = ""

    async def say(self, conversation: Prompt, **changes: Any) -> str:
        """The model's next words; as :func:`generate_single`."""
        messages = as_messages(conversation)
        if self._seen:
            self._observe(messages)
        self._given, self._seen = conversation, copy.deepcopy(messages)
        self._reply = await self._trajectory.generate(**changes)
        return self._reply

    def is_of(self, conversation: Prompt) -> bool:
        """Whether this very list was given the last time."""
        return self._given is conversation and isinstance(conversation, list)

    def goes_on_in(self, messages: list[Message]) -> bool:
        """Whether messages are these, what the model said, and more."""
        place = len(self._seen)
        return len(messages) > place and messages[:place] == self._seen and self._is_reply(messages)

    def close(self) -> None:
        """The function has ended. If it had something more to show the model, the interaction was cut off."""
        if len(as_messages(self._given)) > len(self._seen) + 1 and self._sample.status is Status.COMPLETED:
            self._sample.status = Status.TRUNCATED

    def _observe(self, messages: list[Message]) -> None:
        where, place = f"the conversation of sample {self._sample.index}", len(self._seen)
        if messages[:place] != self._seen:
            raise GenerationError(
                f"{where} does not go on from the last turn: its first {place} messages have changed; append to it, "
                "and keep one conversation for each sample"
            )
        if not messages[place:] or messages[place].get("role") != "assistant" or not self._is_reply(messages):
            raise GenerationError(
                f"{where} goes on with {str(messages[place : place + 1])[:200]}; append what generate_single returned "
                'as {"role": "assistant", "content": …} first, as it is: the tokens are those that the model wrote'
            )
        if len(messages) == place + 1:
            raise GenerationError(f"{where} has nothing new for the model; append a message after the assistant's")
        last_token = self._sample.tokens[-1]
        tokens = self._chat.continuation(self._seen, messages[place + 1 :], last_token=last_token, tools=self._tools)
        self._trajectory.observe(tokens)

    def _is_reply(self, messages: list[Message]) -> bool:
        message = messages[len(self._seen)]
        return message.get("role") == "assistant" and str(message.get("content") or "").strip() == self._reply.strip()

    def _replace_prompt(self, call: HookCall, conversation: Prompt) -> None:
        sample, prompt = self._sample, call.prompt_of(self._sample)
        same = conversation == prompt or as_messages(conversation) == as_messages(prompt)
        if same and sample.tokens:
            return
        if isinstance(conversation, str):
            raise GenerationError(
                f"generate_single got a text that is not the prompt of sample {sample.index}; give chat messages"
            )
        sample.tokens = self._chat.prompt(as_messages(conversation), self._tools)


def _owner(call: HookCall, conversation: Prompt) -> Sample:
    """Whose conversation it is: by the list itself, or else by what it says."""
    if len(call.samples) == 1:
        return call.samples[0]
    if isinstance(conversation, list):
        for sample in call.samples:
            talk = call.conversations.get(sample.index)
            if sample.prompt is conversation or (talk is not None and talk.is_of(conversation)):
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
    return bool(talk.goes_on_in(messages))
