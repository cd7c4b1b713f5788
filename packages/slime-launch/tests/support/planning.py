"""A plan of a command, as it is printed."""

import json

from slime_launch.cli import main


def run(words, capsys):
    """Exit code, standard output, standard error."""
    code = main(["plan", *words])
    return code, *capsys.readouterr()


def problems_of(words, capsys):
    """What is wrong with a command, as `plan --json` says it; the same lines are on standard error."""
    code, out, err = run([*words, "--json"], capsys)
    problems = json.loads(out)["problems"]
    assert code == 2
    assert [f"slime-launch: {line}" for line in problems] == err.splitlines()[-len(problems) :]
    return problems
