"""Flags of rewards: rules, services, functions, and a teacher. Nothing here imports torch."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slime_core.errors import ConfigError
from slime_core.flags import Config, flag
from slime_core.needs import GENERATES, SAMPLES, given, unless
from slime_rollout.hook_config import function_flag, time_limit

COMPARING_RULES = ("exact", "first_integer", "math", "deepscaler", "dapo", "f1", "gpqa", "gsm8k", "em")
REMOTE_RULES = ("remote_rm", "boxed_remote_rm")
RULES = (*COMPARING_RULES, *(f"boxed_{name}" for name in COMPARING_RULES), *REMOTE_RULES, "random")
OTHER_RULES = (
    "what others build in is a function of yours, --custom-rm-path: for ifbench one that calls IFBench's own checks, "
    "for geo3k math and a score of the format"
)
DEFAULT_RULE = "exact"
TEACHERS = ("sglang", "megatron")
OWN_RULES = (GENERATES, unless("custom_rm_path") | given("eval_config"))


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Config, needs=GENERATES):
    """Flags of rewards, by a rule, a service or a custom function; and of the teacher of on-policy distillation."""

    rm_type: str | None = flag(
        None,
        choices=RULES,
        advice=OTHER_RULES,
        help="rule that scores a response, unless its row names another as `rm_type` in its metadata; without "
        f"--custom-rm-path and --opd-type `{DEFAULT_RULE}`",
    )
    custom_rm_path: str | None = function_flag(
        "custom reward function or class: pkg.mod.fn, pkg.mod:fn, file.py:fn or file.py"
    )
    custom_rm_kwargs: str | None = flag(
        None,
        help="JSON object: the constructor arguments of a class at --custom-rm-path",
        metavar="JSON",
        needs=given("custom_rm_path"),
    )
    group_rm: bool = flag(
        False, help="score all samples of a prompt in one call of the custom function", needs=given("custom_rm_path")
    )
    rm_timeout: float | None = time_limit(None, "time limit of one sample [10 for rules, else 60]")
    rm_url: str | None = flag(
        None,
        help="address of the service of remote_rm, or of the teacher's server",
        metavar="URL",
        may_change=True,
        needs=(GENERATES, given("rm_type", *REMOTE_RULES) | given("opd_type", "sglang")),
    )
    rm_workers: int = flag(
        4,
        help="most processes that score by a rule at once",
        unit="processes",
        least=1,
        may_change=True,
        needs=OWN_RULES,
    )
    rm_memory_limit: float = flag(
        2.0, help="most memory of one of them", unit="GiB", least=0.5, most=1024, may_change=True, needs=OWN_RULES
    )
    rm_on_failure: str = flag(
        "replace",
        choices=("replace", "zero", "drop"),
        help="a sample that a service, a custom function or a process that died could not score is scored again, and "
        "if that fails too its group gives way to another prompt's (replace); or it counts as wrong (zero), and is "
        "not trained on (drop); a response that a rule cannot read counts as wrong; one that gets no log-probs from "
        "the teacher ends the run, or is not trained on (drop)",
    )
    opd_type: str | None = flag(
        None,
        choices=TEACHERS,
        help="teacher of on-policy distillation: a SGLang server at --rm-url (sglang), or a copy of the model in the "
        "trainer with the weights of --opd-teacher-load (megatron)",
        needs=given("use_opd"),
    )
    reward_key: str | None = flag(None, help="entry to train on when the reward is a dictionary", needs=SAMPLES)

    @property
    def rule(self) -> str | None:
        """The rule that scores; ``None`` if a custom function does, or a teacher alone trains."""
        if self.custom_rm_path is not None:
            return None
        return self.rm_type or (DEFAULT_RULE if self.opd_type is None else None)

    @property
    def reward_timeout(self) -> float:
        """Seconds that scoring one sample may take."""
        return self.timeout_of_rule(self.rule)

    def timeout_of_rule(self, rule: str | None) -> float:
        """Seconds that a rule (``None``: a custom function) may take for one sample."""
        return self.rm_timeout or (60.0 if rule is None or rule in REMOTE_RULES else 10.0)

    @property
    def teacher_timeout(self) -> float:
        """Seconds that a teacher's log-probs of one sample may take."""
        return self.rm_timeout or 60.0

    @property
    def custom_rm_arguments(self) -> dict[str, Any] | None:
        """``--custom-rm-kwargs``, parsed."""
        text = self.custom_rm_kwargs
        return None if text is None else json_object("custom-rm-kwargs", text, '{"name": value}')

    def contradictions(self) -> Iterator[str]:
        """Settings that exclude or need each other."""
        try:
            _ = self.custom_rm_arguments
        except ConfigError as error:
            yield str(error)
        if self.rm_type is not None and self.custom_rm_path is not None:
            yield (
                f"--rm-type {self.rm_type} and --custom-rm-path {self.custom_rm_path} are both given; give one of them"
            )
        if self.opd_type != "sglang" and self.rm_type in REMOTE_RULES and self.rm_url is None:
            yield f"--rm-type {self.rm_type} needs --rm-url, the address of its service; add that"
        if self.rm_url is not None and not _is_address(self.rm_url):
            yield f"--rm-url {self.rm_url} is not an address; write http://HOST:PORT/PATH"
        if self.rule in ("dapo", "boxed_dapo") and self.reward_key not in ("score", "acc"):
            yield f"--rm-type {self.rule} {dapo_gives(self.reward_key)}"
        if self.opd_type != "sglang":
            return
        if self.rm_type in REMOTE_RULES:
            yield (
                "--rm-url is the teacher's address with --opd-type sglang, so --rm-type remote_rm cannot have it too; "
                "score by another rule or with --custom-rm-path"
            )
        if self.rm_url is None:
            yield "--opd-type sglang needs --rm-url, the address of a SGLang server with the teacher"


def dapo_gives(reward_key: str | None) -> str:
    """A message about an unfit ``--reward-key`` of the rule ``dapo``."""
    no_entry = "" if reward_key is None else f", no {reward_key}"
    return f"gives score (1 or -1) and acc (1 or 0){no_entry}; choose one with --reward-key"


def json_object(name: str, text: str, example: str) -> dict[str, Any]:
    """The value of the flag ``name``. Raises ConfigError unless it is the JSON of an object."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--{name} {text} is not JSON ({error}); give an object such as {example}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--{name} {text} is not a JSON object; give one such as {example}")
    return values


def _is_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
