"""The command ``slime-launch``. Its process only parses, checks and waits; the run happens below a supervisor."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from slime_convert.errors import ConvertError
from slime_core.errors import SlimeError
from slime_core.importing import keep_to_installed
from slime_core.redact import redact_logs, redacted, secrets_of
from slime_core.words import shortened
from slime_launch.commands import COMMANDS, unknown_command, usage
from slime_launch.errors import FlagError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line: the words after ``slime-launch``, by default those of this process.

    Returns:
        0; 1 if a part of the run failed; 2 if the command cannot work; 3 if the trainers were lost too often; 128 + n
        if signal n stopped it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    redact_logs()
    try:
        with keep_to_installed():
            return _dispatch(words)
    except (SlimeError, ConvertError) as error:
        print(f"slime-launch: {shortened(redacted(str(error), secrets_of(os.environ)))}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the help has stopped, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt:
        print("slime-launch: interrupted; nothing was started", file=sys.stderr)
        return 130


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["--version"]:
        if words[1:]:
            raise FlagError(f"unexpected {words[1]!r} after --version; it stands alone")
        from importlib.metadata import version

        print(f"slime-launch {version('slime-launch')}")
        return 0
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words[0] not in COMMANDS:
        raise FlagError(unknown_command(words[0]))
    return COMMANDS[words[0]](words[1:])


if __name__ == "__main__":
    sys.exit(main())
