"""Text without the secrets in it: for errors, logs, and files that a run leaves behind."""

from __future__ import annotations

import logging
import os
import re
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "[removed]"
SHORTEST = 8
"""Secrets of the environment that are shorter are not looked for in other text: too much is like them."""

_NAMES = re.compile(
    r"(^|[._-])(api_?key|wandb_key|access_?key|account_?key|private_?key|secret|secret_?key|password|passwd|passphrase"
    r"|(?<!(?:eos|bos|pad|unk|per)[_-])(?<!first[_-])token|credentials?|authorization|auth|(set[_-])?cookie|signature"
    r"|sig|dsn|connection_?string|webhook(_url)?|(?<=[a-z0-9][_-])pwd)$",
    re.IGNORECASE,
)
"""Names of flags, variables, headers and JSON keys whose value is a secret."""
_KEYS = re.compile(r"[a-z0-9][_-]key$", re.IGNORECASE)
_PLAIN_KEYS = re.compile(
    r"(input|label|tool|reward|metadata|chosen|rejected|linear|extra|routing|prompt|image|public|cache|sort|group"
    r"|session|primary|foreign)[_-]key$",
    re.IGNORECASE,
)
"""Other names that end in ``key`` are of secrets, too, but for the names of columns and the like."""
_FORMS = re.compile(
    r"-----BEGIN[ A-Z]* PRIVATE KEY-----.*?(?:-----END[ A-Z]* PRIVATE KEY-----|\Z)"
    r"|(?<=://)[^/@\s\"']+(?=@)"  # user and password in an address
    r"|(?<=hooks\.slack\.com/services/)[\w/]+|(?<=discord\.com/api/webhooks/)[\w/-]+"
    r"|(?<=\bbearer )\s*[^\s\"',}]+"
    r"|\b(?:"
    r"hf_\w{16,}|api_org_\w{16,}"  # Hugging Face
    r"|sk-[\w-]{16,}|xai-\w{20,}|gsk_\w{20,}|nvapi-[\w-]{20,}|r8_\w{30,}|fw_\w{20,}|lsv2_\w{20,}|pplx-\w{20,}"  # models
    r"|gh[pousr]_\w{20,}|github_pat_\w{20,}|gl(?:pat|dt|rt|ptt|cbt|ft|soat)-[\w-]{16,}"  # GitHub, GitLab
    r"|xox[abeprs]-[\w-]{10,}|xapp-[\w-]{10,}"  # Slack
    r"|(?:AKIA|ASIA|ABIA|ACCA|AROA|AIDA)[0-9A-Z]{16}"  # AWS
    r"|AIza[\w-]{30,}|ya29\.[\w-]{10,}|GOCSPX-[\w-]{20,}"  # Google
    r"|npm_\w{30,}|pypi-[\w-]{20,}|rubygems_\w{30,}|dckr_pat_[\w-]{20,}"  # registries
    r"|SG\.[\w-]{16,}\.[\w-]{16,}|key-[0-9a-f]{32}|[0-9a-f]{32}-us\d{1,2}"  # mail
    r"|[rs]k_(?:live|test)_\w{16,}|sq0[a-z]{3}-[\w-]{20,}|(?:AC|SK)[0-9a-f]{32}(?![0-9a-f])"  # payments, telephony
    r"|(?-i:[MNO])[\w-]{23,25}\.[\w-]{6}\.[\w-]{27,}|\d{8,10}:[\w-]{35}"  # Discord, Telegram
    r"|dop_v1_[0-9a-f]{40,}|dapi[0-9a-f]{32}|tskey-[\w-]{16,}|glsa_\w{30,}|ATATT3[\w=-]{20,}|wandb_v1_\w{20,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+"  # JSON web tokens
    r")",
    re.IGNORECASE | re.DOTALL,
)
"""Secrets that are known by their form, as the services document it; detect-secrets and gitleaks look for the same."""
_HEADER = re.compile(r"(authorization\\*[\"']?\s*[:=]\s*\\*[\"']?)(?:\w+ +)?[^\s\"',}\\]+", re.IGNORECASE)
"""Its value has a scheme and a secret, or a secret alone. JSON within JSON has backslashes before its quotes."""
_NAME = re.compile(r"([\w.-]+)\\*[\"']?\s*[=:]\s*")
_VALUE = re.compile(r"\\*[\"']?([^\"'&,;?=\s}\\]+=*)")
"""``name=value`` or ``"name": "value"`` within a text."""
_QUERIES = re.compile(r"(?<=[?&])(key|x-(?:amz|goog)-\w+(?:-\w+)*)=([^&#\s\"']+)", re.IGNORECASE)
"""Of an address, whose names are shorter."""


def is_secret(name: str) -> bool:
    """Whether a flag, variable, header or JSON key of that name has a secret as its value."""
    if _NAMES.search(name.replace("-", "_")) is not None:
        return True
    return _KEYS.search(name) is not None and _PLAIN_KEYS.search(name) is None


def secrets_of(environment: Mapping[str, str]) -> list[str]:
    """Values of an environment that are secrets by their names, the longest first."""
    found = {value for name, value in environment.items() if is_secret(name) and len(value) >= SHORTEST}
    return sorted(found, key=len, reverse=True)


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """The text with each secret in it replaced: those given, and what is known by its form or the name before it."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    # Pairs of one name and one word come last: they would take a header's scheme for its secret.
    text = _FORMS.sub(HIDDEN, text)
    text = _HEADER.sub(rf"\1{HIDDEN}", text)
    text = _QUERIES.sub(lambda match: f"{match[1]}={HIDDEN}", text)
    parts, end = [], 0
    for name in _NAME.finditer(text):
        value = _VALUE.match(text, name.end()) if name.start() >= end and is_secret(name[1]) else None
        if value is not None:
            parts += [text[end : value.start(1)], HIDDEN]
            end = value.end(1)
    return "".join([*parts, text[end:]])


def redact_logs() -> None:
    """Have all that this process logs pass through :func:`redacted`, with the secrets of its environment."""
    make_record, secrets = logging.getLogRecordFactory(), secrets_of(os.environ)
    if getattr(make_record, "redacts", False):
        return

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        made = make_record(*args, **kwargs)
        made.msg, made.args = redacted(made.getMessage(), secrets), ()
        if made.exc_info and made.exc_info[0] is not None:
            made.exc_text = redacted("".join(traceback.format_exception(*made.exc_info)).rstrip(), secrets)
        return made

    record.redacts = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(record)
