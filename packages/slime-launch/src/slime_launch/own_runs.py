"""Which runs are this user's own: their settings have a mark that nobody else can make.

Who owns a folder, or what is written in it, says nothing of that: a copy is owned by who made it. The key of the marks
lies in the user's own folder, and is in no run.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MARK = "mark"
"""Its name in ``settings.json``."""
_KEY_BYTES = 32


def mark_of(settings: Mapping[str, Any]) -> str | None:
    """This user's mark of settings that are written down; ``None`` where a key cannot be kept.

    It holds in the working folder alone: the functions that settings name may be found in another one elsewhere.
    """
    if (key := _key()) is None:
        return None
    text = json.dumps([str(Path.cwd()), json.loads(json.dumps(settings))], sort_keys=True)  # keys as the file has them
    return hmac.digest(key, text.encode(), "sha256").hex()


def is_own(found: Mapping[str, Any]) -> bool:
    """Whether a run of this user has written this content of a ``settings.json``, in this working folder."""
    given, right = found.get(MARK), mark_of(found["settings"])
    return (
        right is not None
        and isinstance(given, str)
        and hmac.compare_digest(given.encode("ascii", "replace"), right.encode())
    )


def _key() -> bytes | None:
    """The user's key, made if it is not there; ``None`` if there can be none, or others can read or change it."""
    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
        path = state / "slime" / "key"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            _make(path)
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, RuntimeError):  # no home, a full disk, a link
        return None
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
        key = file.read(_KEY_BYTES) if is_ours else b""
    return key if len(key) == _KEY_BYTES else None


def _make(path: Path) -> None:
    """Another process finds either no key or a whole one; raises FileExistsError if another was first."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    if path.exists():
        return
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        os.link(partial, path)
    finally:
        partial.unlink(missing_ok=True)
