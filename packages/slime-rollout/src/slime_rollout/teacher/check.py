"""Before a run: is the teacher there, and do its token ids mean what the student's mean?"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from slime_rollout.config import RolloutConfig
from slime_rollout.data.chat import load_tokenizer
from slime_rollout.errors import TeacherError
from slime_rollout.http import HttpError, call
from slime_rollout.service import ATTEMPTS
from slime_rollout.teacher.log_probs import (
    TeacherLogProbs,
    TeacherVocabulary,
    generate_url,
    read_log_probs,
    request,
    said,
)

logger = logging.getLogger(__name__)

_COMPARED = 96  # ordinary tokens, spread over the vocabulary
_ADDED = 32  # added ones, such as those of chat templates


def make_teacher(config: RolloutConfig) -> TeacherLogProbs | None:
    """The teacher that ``--opd-type`` and ``--rm-url`` choose, checked; ``None`` without ``--opd-type``.

    Raises:
        ConfigError: The student's tokenizer cannot be read.
        TeacherError: The teacher does not answer, gives no log-probs, or has another vocabulary.
    """
    if config.opd_type is None or config.rm_url is None:
        return None
    url = generate_url(config.rm_url)
    name = _name(url, config.teacher_timeout)
    tokenizer = load_tokenizer(config.hf_checkpoint)
    vocabulary = check_vocabulary(url, name, tokenizer, config)
    _check_length(url, config)
    logger.info("the teacher at %s is %s", url, name)
    return TeacherLogProbs(
        url, timeout=config.teacher_timeout, vocabulary=vocabulary, drop=config.rm_on_failure == "drop"
    )


def check_vocabulary(url: str, name: str, tokenizer: Any, config: RolloutConfig) -> TeacherVocabulary:
    """Ask about tokens of the whole vocabulary, and compare what they read with what the student's tokenizer says.

    Args:
        url: Where the teacher is asked.
        name: What it calls itself.
        tokenizer: The student's.
        config: Where the student is.

    Raises:
        TeacherError: The teacher has no such tokens, or they read otherwise.
    """
    tokens = _tokens_to_compare(tokenizer)
    vocabulary, reply = _ask(url, tokens, _largest_tokens(tokenizer, config.hf_checkpoint), config.teacher_timeout)
    texts = [entry[2] if len(entry) > 2 else None for entry in _entries(reply)[:-1]]
    if None in texts:
        logger.warning("the teacher at %s does not say how its tokens read, so only their numbers are compared", url)
        return vocabulary
    added = set(getattr(tokenizer, "added_tokens_decoder", {}))
    others = [
        (token, ours, theirs)
        for token, theirs in zip(tokens, texts, strict=True)
        if (ours := tokenizer.decode([token])).strip() != str(theirs).strip() and token != vocabulary.shown_as_zero
    ]
    shown = ", ".join(f"{token} is {ours!r} here and {theirs!r} there" for token, ours, theirs in others[:3])
    if any(token not in added for token, _, _ in others):
        raise TeacherError(
            f"the teacher at {url} ({name}) has another vocabulary than --hf-checkpoint {config.hf_checkpoint}: of "
            f"{len(tokens)} tokens {len(others)} differ ({shown}); distillation needs a teacher with the same tokenizer"
        )
    if others:
        logger.warning("the teacher at %s reads %d added tokens otherwise: %s", url, len(others), shown)
    return vocabulary


def _ask(url: str, tokens: list[int], largest: list[int], timeout: float) -> tuple[TeacherVocabulary, dict[str, Any]]:
    """The answer about ``tokens`` and one more: the largest of ``largest`` that the teacher knows.

    It is named in ``token_ids_logprob`` too, where SGLang refuses ids beyond its vocabulary; as input they would stop
    the server.
    """
    for last in largest:
        asked = [*tokens, last]
        body = request(asked, 0, token_ids_logprob=[last], return_text_in_logprobs=True)
        try:
            reply = call("POST", url, body, timeout=timeout, attempts=ATTEMPTS)
        except HttpError as error:
            if error.status == 400 and "vocabulary" in error.body:
                continue
            raise TeacherError(f"the teacher at {url} gives no log-probs ({said(error)})") from error
        vocabulary = TeacherVocabulary(largest=last, shown_as_zero=last)
        try:
            read_log_probs(reply, asked, vocabulary)
        except TeacherError as error:
            raise TeacherError(f"the teacher at {url} {error}") from None
        if _entries(reply)[-1][1] == last:
            vocabulary = TeacherVocabulary(largest=last)
        return vocabulary, reply
    raise TeacherError(
        f"the teacher at {url} does not know token {largest[-1]} of the student: its vocabulary is smaller; "
        "distillation needs a teacher with the same tokenizer"
    )


def _entries(reply: dict[str, Any]) -> list[list[Any]]:
    """What an answer says of each token, where :func:`read_log_probs` could read it."""
    entries: list[list[Any]] = reply["meta_info"]["input_token_logprobs"]
    return entries


def _tokens_to_compare(tokenizer: Any) -> list[int]:
    known = sorted(set(tokenizer.get_vocab().values()))
    added = sorted(getattr(tokenizer, "added_tokens_decoder", {}))
    spread = known[:: max(1, len(known) // _COMPARED)]
    return sorted({*spread, *added[:_ADDED]})


def _largest_tokens(tokenizer: Any, hf_checkpoint: str) -> list[int]:
    """The largest id that the student's output layer has, and the largest with a text: many vocabularies are padded."""
    named = max(tokenizer.get_vocab().values())
    try:
        values = json.loads((Path(hf_checkpoint) / "config.json").read_text(encoding="utf-8"))
        padded = int(values.get("vocab_size") or values["text_config"]["vocab_size"]) - 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [named]
    return [padded, named] if padded > named else [named]


def _name(url: str, timeout: float) -> str:
    """What the teacher calls itself; fails if nobody is there."""
    root = url.removesuffix("/generate")
    for path in ("model_info", "get_model_info"):  # the latter is what older servers and the router know
        try:
            info = call("GET", f"{root}/{path}", timeout=timeout, attempts=ATTEMPTS)
        except HttpError as error:
            if error.may_pass:
                raise TeacherError(
                    f"the teacher at --rm-url {root} does not answer ({said(error)}); start it first, "
                    "such as with python -m sglang.launch_server --model-path TEACHER"
                ) from error
            continue
        if isinstance(info, dict) and info.get("is_generation") is False:
            raise TeacherError(f"the teacher at --rm-url {root} serves {info.get('model_path')}, no language model")
        if isinstance(info, dict) and info.get("model_path"):
            return str(info["model_path"])
    return "a server that does not say its model"


def _check_length(url: str, config: RolloutConfig) -> None:
    """Warn where samples may get longer than what the teacher takes. A router does not say it."""
    try:
        info = call("GET", url.removesuffix("/generate") + "/server_info", timeout=config.teacher_timeout)
    except HttpError:
        return
    limit = info.get("max_req_input_len") if isinstance(info, dict) else None
    longest = (config.rollout_max_prompt_len or 1) + config.rollout_max_response_len
    if config.rollout_max_context_len is not None:
        longest = min(longest, config.rollout_max_context_len)
    if isinstance(limit, int) and longest >= limit:
        logger.warning(
            "samples may get %d tokens long, and the teacher at %s takes %d; raise its --context-length by %d",
            longest,
            url,
            limit - 1,
            longest - limit + 1,
        )
