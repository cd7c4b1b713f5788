"""One prompt, one response."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from slime_core.types import Group, Sample, Status
from slime_rollout.generate.completion import Completion
from slime_rollout.generate.context import GenerationContext

FINISHED = (Status.COMPLETED, Status.TRUNCATED)


def single_turn(group: Group, context: GenerationContext) -> list[Awaitable[list[Sample]]]:
    """The response of each sample of a group. Is a :data:`~slime_rollout.generate.context.GenerateGroup`."""
    return [generate_sample(sample, context) for sample in group]


async def generate_sample(sample: Sample, context: GenerationContext) -> list[Sample]:
    """Sample the response of a sample, or the rest of one that was cut off, and fill it in.

    Sets ``tokens``, ``response``, ``response_length``, ``rollout_log_probs``, ``weight_versions`` and ``status``.

    Args:
        sample: Pending, or ``ABORTED`` with the response so far: that is kept, and counts towards the longest
            response. A finished one stays as it is, and so does any once ``context.stop`` is set.
        context: Where the request goes, and how tokens are drawn.

    Returns:
        The sample.

    Raises:
        GenerationError: See :meth:`EngineClient.generate`.
    """
    if sample.status in FINISHED or context.stop.is_set():
        return [sample]
    if sample.status is not Status.ABORTED:
        clear_response(sample)
    room = context.params.room(sample)
    if not room:
        sample.status = Status.TRUNCATED
        return [sample]
    request = context.params.to_request(context.seed(sample), max_new_tokens=room)
    done = await context.client.generate(sample.tokens, request, session_id=sample.session_id)
    _extend(sample, done, context.tokenizer)
    return [sample]


def clear_response(sample: Sample) -> None:
    """Make a sample its prompt again."""
    sample.tokens = sample.prompt_tokens
    sample.response, sample.response_length = "", 0
    sample.loss_mask = sample.rollout_log_probs = sample.teacher_log_probs = None
    sample.weight_versions = []
    sample.reward, sample.status = None, Status.PENDING


def _extend(sample: Sample, done: Completion, tokenizer: Any) -> None:
    """Add what an engine sampled to a sample's response. Without a tokenizer an aborted one adds nothing."""
    if tokenizer is None and done.status is Status.ABORTED:
        done = Completion.nothing()
    if tokenizer is not None and (sample.response_length or done.status is Status.ABORTED):
        text = _joined_text(sample, done, tokenizer)
    else:
        text = sample.response + done.text
    if done.tokens:
        sample.append_response(done.tokens, log_probs=done.log_probs, weight_version=done.weight_versions)
    elif not sample.response_length:
        sample.rollout_log_probs = []
    sample.response = text
    sample.status = done.status


def _joined_text(sample: Sample, done: Completion, tokenizer: Any) -> str:
    """The text of the whole response: a character may have bytes on both sides of a cut."""
    whole: str = tokenizer.decode([*sample.response_tokens, *done.tokens], skip_special_tokens=True)
    if done.status is Status.ABORTED:
        return whole
    last: str = tokenizer.decode(done.tokens, skip_special_tokens=True)
    # The engine leaves a stop string out of the text, not out of the tokens.
    return whole[: len(whole) - (len(last) - len(done.text))] if last.startswith(done.text) else whole
