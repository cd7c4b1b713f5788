"""Run files: flags by name, and their values as words of a command line."""

import pytest

from slime_core.errors import ConfigError
from slime_rollout.run_file import check_tables, read_run_file, words_of


def test_flags_of_a_file_are_words_as_they_are_written(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('lr = 1e-6\nuse_tis = true\ncolocate = false\nstop = ["-a", "b", "c"]\n')
    given = read_run_file(str(path))
    assert [words_of("run.toml", name, value) for name, value in given.items()] == [
        ["--lr=1e-6"],
        ["--use-tis"],
        ["--colocate=false"],
        ["--stop=-a", "--stop", "b", "c"],
    ]
    assert words_of("run.yaml", "--lr", None) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [("a_b = 1\na-b = 2", "has a-b twice"), ('config = "x"', "names another file"), ("lr = ", "cannot be read")],
)
def test_a_file_that_is_no_list_of_flags(tmp_path, text, problem):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_run_file(str(path))


def test_flags_in_a_table_are_named():
    with pytest.raises(ConfigError, match=r"trainer\.lr is in a table"):
        check_tables("run.toml", {"--trainer": {"lr": 1}}, {})
