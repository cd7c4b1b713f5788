"""Settings without secrets, for files that a run leaves behind."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.redact import HIDDEN, is_secret, redacted, secrets_of


def without_secrets(values: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The same values by name, each secret in them replaced.

    Secrets of the ``environment``, this process's unless given, are also removed where they stand in other values.
    """
    secrets = secrets_of(os.environ if environment is None else environment)
    return {name: _clean(name, value, secrets) for name, value in values.items()}


def may_be_same(one: Any, other: Any) -> bool:
    """Whether values may be the same, of which ``one`` is without its secrets: these may have been anything."""
    if one == other:
        return True
    parts = json.dumps(one).split(HIDDEN)
    return len(parts) > 1 and re.fullmatch(".*".join(map(re.escape, parts)), json.dumps(other)) is not None


def _clean(name: str, value: Any, secrets: Sequence[str]) -> Any:
    if is_secret(name) and value not in (None, "", False):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: _clean(str(key), item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean("", item, secrets) for item in value]
    return redacted(value, secrets) if isinstance(value, str) else value
