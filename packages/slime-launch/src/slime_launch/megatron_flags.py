"""Megatron's arguments that are not flags of slime's: parsed, answered or refused. Read only when one was typed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from slime_convert.shape import ModelShape
from slime_launch.devices import run_device
from slime_launch.parser import FlagGroup
from slime_megatron import service  # a name of it is loaded when it is used

TITLE = "Megatron: its other arguments"
NOTE = (
    "Every argument of the installed Megatron-core, such as --moe-z-loss-coeff 0.001, and of Megatron's own command\n"
    "line. `slime-launch train --help-megatron` lists them, and says which have no effect here and which are refused."
)


def unknown_words(argv: Sequence[str], known: Collection[str]) -> list[str]:
    """The flags of a command line that are not slime's, nor of SGLang and its router."""
    names = dict.fromkeys(word.split("=")[0] for word in argv if word.startswith("--") and word != "--help")
    return [name for name in names if name not in known and not name.startswith(("--sglang-", "--router-"))]


def megatron_groups(argv: Sequence[str], known: Collection[str]) -> list[FlagGroup]:
    """Megatron's words, in two groups: taken, and refused; both are empty unless one may have been typed."""
    words = service.field_words().values() if unknown_words(argv, known) else ()
    new = [word for word in words if word.spec.name not in known]
    taken = tuple(word.spec for word in new if not word.is_refused)
    refused = tuple(word.spec for word in new if word.is_refused)
    return [
        FlagGroup(TITLE, taken, NOTE, hidden=True),
        FlagGroup("Megatron: what is refused", refused, hidden=True, suggested=False),
    ]


def argument_notes(megatron: service.MegatronConfig, shape: ModelShape) -> list[str]:
    """Which of the arguments have no effect, in one line, if there are any."""
    lines = service.argument_notices(megatron, shape, on_gpu=run_device() == "cuda")
    return [f"Megatron's arguments: {'; '.join(lines)}"] if lines else []


def megatron_help(known: Collection[str]) -> Iterator[str]:
    """The text of ``--help-megatron``, a line for each word."""
    for name, word in sorted(service.field_words().items()):
        if name not in known:
            value = "" if word.spec.is_switch else f" VALUE{' …' if word.spec.nargs else ''}"
            why = f": {word.reason}" if word.reason else ""
            yield f"{name}{value}  {word.spec.help} [{word.becomes}{why}]"
    for name, found in sorted(service.other_words().items()):
        yield f"{name}  [{'no effect' if found.has_no_effect else 'refused'}: {found.reason}]"
