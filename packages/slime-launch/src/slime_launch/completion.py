"""``slime-launch completion bash|zsh``: a shell's completion of commands, flags and values, from the flag tables."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from slime_core.flags import FlagSpec, flag_specs
from slime_launch.commands import COMMANDS
from slime_launch.errors import FlagError
from slime_launch.flags import own_flags
from slime_launch.plan.command import PlanConfig

USAGE = """\
usage: slime-launch completion bash|zsh

    eval "$(slime-launch completion bash)"      in ~/.bashrc
    eval "$(slime-launch completion zsh)"       in ~/.zshrc, after compinit"""
SHELLS = ("bash", "zsh")
OTHERS = {
    "migrate": ["--toml"],
    "doctor": ["--sglang-python"],
    "completion": list(SHELLS),
    "recipes": ["--help"],
    "new": ["--from"],
}
"""Words of the commands that have not the flags of ``train``."""


def completion(argv: list[str]) -> int:
    """Print the completion of a shell."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if argv[1:]:
        raise FlagError(f"unexpected {argv[1]!r} after {argv[0]}; completion takes one shell: {', '.join(SHELLS)}")
    if argv[0] not in SHELLS:
        raise FlagError(f"completion {argv[0]}: allowed: {', '.join(SHELLS)}")
    of_plan = {spec.name: spec for spec in flag_specs(PlanConfig)}
    print(bash(own_flags(), of_plan) if argv[0] == "bash" else zsh(own_flags(), of_plan))
    return 0


def bash(flags: Mapping[str, FlagSpec], of_plan: Mapping[str, FlagSpec]) -> str:
    """Completion for bash: the flags of training, and those that ``plan`` has besides."""
    return "\n".join(
        [
            "_slime_launch() {",
            '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
            "    local words",
            '    if [ "$COMP_CWORD" = 1 ]; then',
            f"        words={shlex.quote(' '.join([*COMMANDS, '--version', '--help']))}",
            '        COMPREPLY=($(compgen -W "$words" -- "$word")); return',
            "    fi",
            '    case "$before" in',
            *(f'        {name}) words="{" ".join(values)}" ;;' for name, values in _choices(flags).items()),
            "    esac",
            '    if [ -z "$words" ]; then',
            '        case "${COMP_WORDS[1]}" in',
            *(f'            {name}) words="{" ".join(own)}" ;;' for name, own in OTHERS.items()),
            f"            plan) words={shlex.quote(' '.join([*of_plan, *flags]))} ;;",
            f"            *) words={shlex.quote(' '.join(flags))} ;;",
            "        esac",
            '        if [[ "$word" != -* && "${COMP_WORDS[1]}" != completion ]]; then',
            '            COMPREPLY=($(compgen -f -- "$word")); return',
            "        fi",
            "    fi",
            '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
            "}",
            "complete -o filenames -F _slime_launch slime-launch",
        ]
    )


def zsh(flags: Mapping[str, FlagSpec], of_plan: Mapping[str, FlagSpec]) -> str:
    """Completion for zsh, with the flags' help: those of training, and those that ``plan`` has besides."""
    return "\n".join(
        [
            "#compdef slime-launch",
            "_slime_launch() {",
            "    local -a commands flags",
            "    commands=(",
            *(f"        {_described(name, command.help)}" for name, command in COMMANDS.items()),
            "    )",
            "    if (( CURRENT == 2 )); then _describe command commands; return; fi",
            "    case ${words[CURRENT-1]} in",
            *(f"        {name}) compadd -- {' '.join(values)}; return ;;" for name, values in _choices(flags).items()),
            "    esac",
            "    case ${words[2]} in",
            *(f"        {name}) compadd -- {' '.join(own)}; _files; return ;;" for name, own in OTHERS.items()),
            "    esac",
            "    if [[ ${words[CURRENT]} != -* ]]; then _files; return; fi",
            "    flags=(",
            *(f"        {_described(spec.name, spec.help)}" for spec in flags.values()),
            "    )",
            "    if [[ ${words[2]} == plan ]]; then flags+=(",
            *(f"        {_described(spec.name, spec.help)}" for spec in of_plan.values()),
            "    ); fi",
            "    _describe -o flag flags",
            "}",
            "compdef _slime_launch slime-launch",
        ]
    )


def _choices(flags: Mapping[str, FlagSpec]) -> dict[str, tuple[str, ...]]:
    return {name: spec.choices for name, spec in flags.items() if spec.choices}


def _described(name: str, text: str) -> str:
    return shlex.quote(f"{name}:{text.replace(':', ' -')}")
