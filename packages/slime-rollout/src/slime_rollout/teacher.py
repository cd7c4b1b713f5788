"""On-policy distillation: log-probs of responses under the weights of a teacher, a SGLang server.

The teacher is checked before a run: it must be there, and its token ids must mean what the student's mean.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from slime_core.errors import DataError
from slime_core.redact import redacted
from slime_core.types import Sample, Status
from slime_rollout.config import RolloutConfig
from slime_rollout.data.chat import load_tokenizer
from slime_rollout.errors import TEACHER_FAILURE, TeacherError, withdraw
from slime_rollout.http import ATTEMPTS, REQUESTS, HttpError, Service, call
from slime_rollout.limits import LARGEST_LOG_PROB, LEAST_LOG_PROB, ModelLimits

logger = logging.getLogger(__name__)

_COMPARED = 96  # ordinary tokens, spread over the vocabulary
_ADDED = 32  # added ones, such as those of chat templates
_SHOWN = 300  # characters
_ANSWER_BYTES = 2**20  # of everything but the tokens
_TOKEN_BYTES = 256  # of a token's log-prob and number, written as JSON


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeacherVocabulary:
    """Token ids that the teacher can be asked about."""

    largest: int  # of those that it knows and the student may write
    # The last id of its vocabulary, if the student may write it: SGLang takes it for the placeholder of an image and
    # answers with 0 in its place, with the right log-prob.
    shown_as_zero: int | None = None


class TeacherLogProbs:
    """Asks the teacher about finished samples and sets their ``teacher_log_probs``.

    Each is one request: prompt and response as token ids, nothing to generate. The values are those of the teacher's
    own distribution, at temperature 1. Untrained tokens of a response, such as a tool's answer, get theirs too.

    With ``drop`` a sample without log-probs is left out of training, and only 64 in a row end the run. ``timeout``
    limits one attempt, in seconds; there are four.
    """

    def __init__(self, url: str, *, timeout: float, vocabulary: TeacherVocabulary, drop: bool = False) -> None:
        self._service = Service(generate_url(url), timeout=timeout)
        self._vocabulary = vocabulary
        self._drop = drop
        self._failed_in_a_row = 0

    async def __call__(self, sample: Sample) -> None:
        """Set ``sample.teacher_log_probs``, unless they are set or the sample failed; `TeacherError` without them."""
        if sample.teacher_log_probs is not None or sample.status is Status.FAILED:
            return
        try:
            sample.teacher_log_probs = await self._score(sample)
        except TeacherError as error:
            self._failed_in_a_row += 1
            if not self._drop or self._failed_in_a_row >= REQUESTS:
                raise
            sample.metadata[TEACHER_FAILURE] = str(error)
            sample.remove_sample = True
            logger.warning("sample %d is not trained on: %s", sample.index, error)
        else:
            self._failed_in_a_row = 0
            withdraw(sample, TEACHER_FAILURE)

    async def _score(self, sample: Sample) -> list[float]:
        if not sample.response_length:
            return []
        start = len(sample.tokens) - sample.response_length - 1
        where = f"sample {sample.index} of {len(sample.tokens)} tokens"
        if start < 0:
            raise DataError(f"{where}: a response without a prompt token, so nothing predicts its first token")
        if (beyond := max(sample.tokens)) > self._vocabulary.largest:
            raise TeacherError(
                f"{where} has the token {beyond}, and the teacher knows none above {self._vocabulary.largest}; "
                "take a teacher of the same vocabulary, or --rm-on-failure drop"
            )
        try:
            most = _ANSWER_BYTES + _TOKEN_BYTES * len(sample.tokens)
            reply = await self._service.ask(request(sample.tokens, start), most=most)
        except HttpError as error:
            raise TeacherError(f"{where}: {_refusal(error)}") from error
        try:
            return read_log_probs(reply, sample.tokens[start:], self._vocabulary)
        except TeacherError as error:
            raise TeacherError(redacted(f"{where}: the teacher at {self._service.url} {error}")) from None


def generate_url(url: str) -> str:
    """The address that is asked, for a server's address with or without ``/generate``."""
    return url.rstrip("/").removesuffix("/generate").rstrip("/") + "/generate"


def request(tokens: list[int] | list[list[int]], start: int, **more: Any) -> dict[str, Any]:
    """A request for log-probs of all tokens after place ``start``, given those before; of one list or several."""
    return {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start,
        **more,
    }


def read_log_probs(reply: Any, tokens: list[int], vocabulary: TeacherVocabulary) -> list[float]:
    """The log-probs in SGLang's answer to :func:`request`, in nats, of all ``tokens`` but the first.

    The first is the token at ``start``: SGLang's list begins with it, without a value. Raises `TeacherError` if the
    answer has another form, is about other tokens, or lacks a value.
    """
    try:
        entries = [(entry[0], entry[1]) for entry in reply["meta_info"]["input_token_logprobs"]]
    except (KeyError, TypeError, IndexError) as error:
        raise TeacherError(
            f"answered in an unknown form ({type(error).__name__}: {error}): {repr(reply)[:_SHOWN]}; "
            "it must be a SGLang server, or sglang-router"
        ) from error
    if len(entries) != len(tokens):
        raise TeacherError(f"answered about {len(entries)} tokens instead of {len(tokens)}")
    for place, ((value, shown), token) in enumerate(zip(entries, tokens, strict=True)):
        if type(shown) is not int or shown not in (token, 0 if token == vocabulary.shown_as_zero else token):
            raise TeacherError(f"answered about token {shown!r} in the place of token {token} ({place} from the start)")
        if place > 0 and (type(value) not in (int, float) or not LEAST_LOG_PROB < value <= LARGEST_LOG_PROB):
            raise TeacherError(f"gave {value!r} as the log-prob of token {token} ({place - 1} of the response)")
    return [float(value) for value, _ in entries[1:]]


def _said(error: HttpError) -> str:
    return f"no answer: {error.problem}" if error.status is None else error.problem


def _refusal(error: HttpError) -> str:
    teacher = f"the teacher at {redacted(error.url)}"
    if error.may_pass:
        return (
            f"{teacher} failed {ATTEMPTS} times, at last with {_said(error)}; look at its log, raise "
            "--rm-timeout, or leave such samples out with --rm-on-failure drop"
        )
    return (
        f"{teacher} refused it ({_said(error)}); where it is too long, raise the teacher's "
        "--context-length, lower --rollout-max-response-len, or choose --rm-on-failure drop"
    )


def make_teacher(config: RolloutConfig) -> TeacherLogProbs | None:
    """The checked teacher of ``--opd-type sglang``; `TeacherError` if it has no log-probs or another vocabulary.

    ``None`` if there is no such teacher: one in the trainer needs nothing of a rollout.
    """
    if config.rewards.opd_type != "sglang" or config.rewards.rm_url is None:
        return None
    url, timeout = generate_url(config.rewards.rm_url), config.rewards.teacher_timeout
    name = _name(url, timeout)
    vocabulary = _check_vocabulary(url, name, config)
    _check_length(url, config)
    logger.info("the teacher at %s is %s", url, name)
    return TeacherLogProbs(url, timeout=timeout, vocabulary=vocabulary, drop=config.rewards.rm_on_failure == "drop")


def _check_vocabulary(url: str, name: str, config: RolloutConfig) -> TeacherVocabulary:
    """Ask about tokens of the whole vocabulary, and compare their texts with those of the student's tokenizer."""
    checkpoint = config.data.hf_checkpoint
    tokenizer = load_tokenizer(checkpoint, trust_remote_code=config.data.trust_remote_code)
    known, added = sorted(set(tokenizer.get_vocab().values())), sorted(getattr(tokenizer, "added_tokens_decoder", {}))
    tokens = sorted({*known[:: max(1, len(known) // _COMPARED)], *added[:_ADDED]})
    vocabulary, texts = _ask(url, tokens, _largest_tokens(known[-1], checkpoint), config.rewards.teacher_timeout)
    if None in texts:
        logger.warning("the teacher at %s does not say how its tokens read, so only their numbers are compared", url)
        return vocabulary
    others = [
        (token, ours, theirs)
        for token, theirs in zip(tokens, texts, strict=True)
        if (ours := tokenizer.decode([token])).strip() != str(theirs).strip() and token != vocabulary.shown_as_zero
    ]
    shown = ", ".join(f"{token} is {ours!r} here and {theirs!r} there" for token, ours, theirs in others[:3])
    if any(token not in added for token, _, _ in others):
        raise TeacherError(
            f"the teacher at {url} ({name}) has another vocabulary than --hf-checkpoint {checkpoint}: of {len(tokens)} "
            f"tokens {len(others)} differ ({shown}); distillation needs one with the same tokenizer"
        )
    if others:
        logger.warning("the teacher at %s reads %d added tokens otherwise: %s", url, len(others), shown)
    return vocabulary


def _ask(url: str, tokens: list[int], largest: list[int], timeout: float) -> tuple[TeacherVocabulary, list[Any]]:
    """Its vocabulary, and its texts of ``tokens``: asks with the largest of ``largest`` that it knows."""
    for last in largest:
        asked = [*tokens, last]
        # In `token_ids_logprob` SGLang refuses ids beyond its vocabulary; as input alone they would stop the server.
        body = request(asked, 0, token_ids_logprob=[last], return_text_in_logprobs=True)
        try:
            reply = call("POST", url, body, timeout=timeout, attempts=ATTEMPTS)
        except HttpError as error:
            if error.status == 400 and "vocabulary" in error.body:
                continue
            raise TeacherError(f"the teacher at {url} gives no log-probs ({_said(error)})") from error
        try:
            read_log_probs(reply, asked, TeacherVocabulary(largest=last, shown_as_zero=last))
        except TeacherError as error:
            raise TeacherError(f"the teacher at {url} {error}") from None
        *entries, (_, shown, *_) = reply["meta_info"]["input_token_logprobs"]
        vocabulary = TeacherVocabulary(largest=last, shown_as_zero=None if shown == last else last)
        return vocabulary, [entry[2] if len(entry) > 2 else None for entry in entries]
    raise TeacherError(
        f"the teacher at {url} does not know token {largest[-1]} of the student: its vocabulary is smaller; "
        "distillation needs a teacher with the same tokenizer"
    )


def _largest_tokens(named: int, hf_checkpoint: str) -> list[int]:
    """The largest id that the student's output layer has, and the largest with a text: many vocabularies are padded."""
    padded = (ModelLimits.of(hf_checkpoint).vocab_size or 0) - 1
    return [padded, named] if padded > named else [named]


def _name(url: str, timeout: float) -> str:
    """The path of the teacher's model; fails if the server does not answer."""
    root = url.removesuffix("/generate")
    for path in ("model_info", "get_model_info"):  # the latter is what older servers and the router know
        try:
            info = call("GET", f"{root}/{path}", timeout=timeout, attempts=ATTEMPTS)
        except HttpError as error:
            if error.may_pass:
                raise TeacherError(
                    f"the teacher at --rm-url {root} does not answer ({_said(error)}); start it first, "
                    "such as with python -m sglang.launch_server --model-path TEACHER"
                ) from error
            continue
        if isinstance(info, dict) and info.get("is_generation") is False:
            raise TeacherError(f"the teacher at --rm-url {root} serves {info.get('model_path')}, no language model")
        if isinstance(info, dict) and info.get("model_path"):
            return str(info["model_path"])
    return "a server that does not name its model"


def _check_length(url: str, config: RolloutConfig) -> None:
    """Warn where samples may get longer than the teacher's inputs may be, which a router does not say."""
    try:
        info = call("GET", url.removesuffix("/generate") + "/server_info", timeout=config.rewards.teacher_timeout)
    except HttpError:
        return
    limit = info.get("max_req_input_len") if isinstance(info, dict) else None
    longest = (config.data.rollout_max_prompt_len or 1) + config.sampling.rollout_max_response_len
    if config.sampling.rollout_max_context_len is not None:
        longest = min(longest, config.sampling.rollout_max_context_len)
    if isinstance(limit, int) and longest >= limit:
        words = "samples may get %d tokens long, and the teacher at %s takes %d; raise its --context-length by %d"
        logger.warning(words, longest, url, limit - 1, longest - limit + 1)
