"""SGLang's own flags, with ``--sglang-`` in front. They are read from the installed SGLang only when one is typed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from slime_core.flags import FlagSpec
from slime_launch.errors import FlagError
from slime_rollout.engine.config import find_python
from slime_rollout.engine.sglang_flags import CONTROLLED, SglangFlag, installed_flags

PREFIX = "--sglang-"


def typed_sglang_specs(argv: Sequence[str], own: Collection[str]) -> list[FlagSpec]:
    """The flags of the installed SGLang, if ``argv`` has any; else none.

    Args:
        argv: A command line.
        own: slime's own flags that begin with ``--sglang-``.

    Raises:
        FlagError: A flag that slime sets itself was typed.
        ConfigError: SGLang is not installed in the engines' interpreter, or cannot be imported there.
    """
    typed = {word.split("=")[0] for word in argv if word.startswith(PREFIX)} - set(own)
    for name in sorted(typed):
        if reason := CONTROLLED.get(name.removeprefix(PREFIX)):
            raise FlagError(f"{name} cannot be given: {reason}")
    return [spec for spec in sglang_specs(argv) if spec.name not in own] if typed else []


def sglang_specs(argv: Sequence[str]) -> list[FlagSpec]:
    """The flags of the SGLang in the interpreter of ``--sglang-python``, without those that slime sets itself.

    Raises:
        ConfigError: SGLang is not installed there, or cannot be imported.
    """
    flags = installed_flags(find_python(sglang_python(argv)))
    return [_spec(flag) for name, flag in sorted(flags.items()) if name not in CONTROLLED]


def sglang_python(argv: Sequence[str]) -> str | None:
    """The value of ``--sglang-python``, read before the parser exists."""
    value = None
    for place, word in enumerate(argv):
        name, _, attached = word.partition("=")
        if name == "--sglang-python":
            value = attached or next(iter(argv[place + 1 :]), None)
    return value


def sglang_name(spec: FlagSpec) -> str:
    """What SGLang itself calls a flag, without dashes in front."""
    return spec.name.removeprefix(PREFIX)


def _spec(flag: SglangFlag) -> FlagSpec:
    name = PREFIX + flag.name
    return FlagSpec(
        name=name,
        dest=name.strip("-").replace("-", "_"),
        type=str if flag.takes_value else bool,
        default=None,
        help=flag.help if flag.default is None else f"{flag.help} [SGLang's default {flag.default}]".lstrip(),
        nargs="+" if flag.several else None,
    )
