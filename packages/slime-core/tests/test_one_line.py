import pytest

from slime_core.errors import ConfigError
from slime_core.one_line import OneLineParser


def parser() -> OneLineParser:
    made = OneLineParser(prog="tool")
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    copy = commands.add_parser("copy")
    copy.add_argument("--from", required=True)
    copy.add_argument("--form-of-names", choices=("short", "long"))
    copy.add_argument("files", nargs="*")
    return made


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("copy --fro a", "unknown flag --fro (did you mean --from?); see tool copy --help"),
        ("copy --fro=a --x 1", "unknown flags --fro (did you mean --from?), --x; see tool copy --help"),
        ("copy b", "the following arguments are required: --from; see tool copy --help"),
        ("copy --from a -q", "unrecognized arguments: -q; see tool copy --help"),
        ("copi --from a", "COMMAND: invalid choice: 'copi' (choose from 'copy'); did you mean copy?; see tool --help"),
        ("--hepl", "unknown flag --hepl (did you mean --help?); see tool --help"),
        (
            "copy --from a --form-of-names shrt",
            "--form-of-names: invalid choice: 'shrt' (choose from 'short', 'long'); did you mean short?; see tool copy",
        ),
    ],
)
def test_an_error_is_one_line_with_what_is_meant_and_the_help_of_the_command(words, line):
    with pytest.raises(ConfigError) as caught:
        parser().parse_args(words.split())
    assert str(caught.value).startswith(line) and str(caught.value).endswith(" --help")


def test_words_behind_two_dashes_are_no_flags():
    assert parser().parse_args(["copy", "--from", "a", "--", "--x"]).files == ["--x"]
