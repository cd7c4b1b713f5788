"""Values without secrets, for files that a run leaves behind."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "[removed]"
NAMES = re.compile(
    r"(^|[_-])(api_?key|wandb_key|access_key|private_key|secret(_key)?|password|passwd"
    r"|(?<!(?:eos|bos|pad|unk|per)[_-])(?<!first[_-])token|credentials?|authorization)$",
    re.IGNORECASE,
)
"""Names of flags, variables and JSON keys whose value is a secret. ``--input-key``, ``--eos-token`` and the like are
none."""
FORMS = re.compile(
    r"hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+|(?<=[Bb]earer )\S+|(?<=://)[^/@\s]+(?=@)"
)
"""Secrets that are known by their form: tokens of services, and user and password in an address."""
PAIRS = re.compile(r"([\"']?)([\w-]+)\1(\s*[=:]\s*)([\"']?)([^\"'&,;?=\s}]+)\4")
"""``name=value`` or ``"name": "value"`` within a text."""
SHORTEST = 8
"""Secrets of the environment that are shorter are not looked for in other values: too much is like them."""


def is_secret(flag: str) -> bool:
    """Whether a flag's value is one."""
    return NAMES.search(flag.replace("-", "_")) is not None


def without_secrets(values: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The same values by name, each secret in them replaced.

    Args:
        environment: Its secrets are also removed where they stand in other values; this process's unless given.
    """
    known = os.environ if environment is None else environment
    secrets = [value for name, value in known.items() if NAMES.search(name) and len(value) >= SHORTEST]
    return {name: _clean(name, value, secrets) for name, value in values.items()}


def may_be_same(one: Any, other: Any) -> bool:
    """Whether values may be the same, of which ``one`` is without its secrets: these may have been anything."""
    if one == other:
        return True
    parts = json.dumps(one).split(HIDDEN)
    return len(parts) > 1 and re.fullmatch(".*".join(map(re.escape, parts)), json.dumps(other)) is not None


def _clean(name: str, value: Any, secrets: list[str]) -> Any:
    if NAMES.search(name) and value not in (None, "", False):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: _clean(str(key), item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean("", item, secrets) for item in value]
    if not isinstance(value, str):
        return value
    for secret in secrets:
        value = value.replace(secret, HIDDEN)
    value = PAIRS.sub(lambda match: match[0].replace(match[5], HIDDEN) if NAMES.search(match[2]) else match[0], value)
    return FORMS.sub(HIDDEN, value)
