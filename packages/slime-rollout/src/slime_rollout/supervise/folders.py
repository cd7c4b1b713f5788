"""Folders of temporary files that only this user can open."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

from slime_rollout.supervise.reaper import is_alive


def private_folder(prefix: str, *, longest: int = 64) -> Path:
    """A new folder for this user alone, named by ``prefix`` and this process; whoever makes it removes it.

    Those of processes that were killed are removed. It is in ``/tmp`` where the path of the folder of temporary files
    has more than ``longest`` bytes: that of a socket has 107 at most.
    """
    base = Path(tempfile.gettempdir())
    base = base if len(str(base)) <= longest else Path("/tmp")
    for old in base.glob(f"{prefix}*"):
        pid = re.match(r"[1-9][0-9]{,8}(?=-)", old.name.removeprefix(prefix))
        with contextlib.suppress(OSError):  # it is being removed
            found = old.lstat()  # anybody may have put a link there
            if pid and stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not is_alive(int(pid[0])):
                shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=base))
