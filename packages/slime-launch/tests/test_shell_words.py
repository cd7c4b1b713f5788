"""The training command of a shell script, found by reading it."""

import pytest

from slime_core.errors import ConfigError
from slime_launch.shell_words import read_command


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python train.py --lr 1 # end", ["--lr", "1"]),
        ("A='x y'; python train.py --save \"$A\"", ["--save", "x y"]),
        ("python train.py --lr \\\n  1 \\\n  --seed 2", ["--lr", "1", "--seed", "2"]),
        ("X=1 python train.py --lr ${X:-5} --seed ${Y:-6}", ["--lr", "1", "--seed", "6"]),
        ("A=(\n)\npython train.py ${A[@]} --lr 1 && echo done", ["--lr", "1"]),
        ("cat <<EOF\npython train.py --seed 3\nEOF\npython train.py --lr 1", ["--lr", "1"]),
        ("--lr 1 --seed 2", ["--lr", "1", "--seed", "2"]),
        (
            "A=(--x 1 $(seq 2 2 6)\n --y $(nproc --all)\n)\npython train.py ${A[@]}",
            ["--x", "1", "2", "4", "6", "--y", "$(nproc --all)"],
        ),
        ("A=(--x $(seq 2) $(seq 3 4)); python train.py ${A[@]}", ["--x", "1", "2", "3", "4"]),
    ],
)
def test_forms_of_the_shell(text, words, tmp_path):
    assert read_command(text, tmp_path).words == words


def test_a_script_without_training(tmp_path):
    with pytest.raises(ConfigError, match="no training command found"):
        read_command("echo train.sh\n", tmp_path)
