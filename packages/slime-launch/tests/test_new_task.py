"""`slime-launch recipes` and `new`: on recipes made here, and on those of the package."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from slime_launch import new_task
from slime_launch.cli import main
from slime_launch.new_task import check_hooks_words, find_recipes, gpus, next_steps, run_flags


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two recipes, `sums` and `sums-long`, in a repository; the working directory is its root."""
    for name, title in (("sums", "Sums"), ("sums-long", "Long sums")):
        folder = tmp_path / "examples" / name
        (folder / "data").mkdir(parents=True)
        (folder / "README.md").write_text(
            f"# {title}\n\n`examples/{name}/run.toml`, runs/{name}/save, not examples/{name}-er; "
            "[start](../../start.md), [none](../none.md#a), [rows](data/rows.jsonl)\n"
        )
        (folder / "run.toml").write_text(
            f'custom_rm_path = "examples/{name}/reward.py:score"\nprompt-data = "examples/{name}/data/rows.jsonl"\n'
            f'save = "runs/{name}"\nactor-num-nodes = 2\nactor-num-gpus-per-node = 8\nrollout-num-gpus = 4\n'
        )
        (folder / "reward.py").write_text("def score(args, sample):\n    return 1.0\n")
        (folder / "data" / "rows.jsonl").write_text('{"prompt": "1"}\n')
        (folder / "data" / "picture.png").write_bytes(b"\xff\xfe examples/sums")
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__" / "reward.pyc").write_bytes(b"\0")
    (tmp_path / "examples" / "sums" / "serve.sh").write_text("#!/bin/sh\n")
    (tmp_path / "examples" / "sums" / "serve.sh").chmod(0o755)
    (tmp_path / "examples" / "no-run-file").mkdir()
    (tmp_path / "examples" / "one_file.py").write_text("")
    (tmp_path / "start.md").write_text("")
    monkeypatch.setattr(new_task, "RECIPES", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_recipes_are_listed_with_where_they_run(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (made / "examples" / "sums" / "laptop.toml").write_text("")
    assert main(["recipes"]) == 0
    shown = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[:2]]
    assert shown == [["sums", "laptop; 20 GPUs  Sums"], ["sums-long", "20 GPUs          Long sums"]]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "1 GPU"),
        ({"colocate": True}, "1 GPU, colocated"),
        ({"actor-num-gpus-per-node": 8, "colocate": True}, "8 GPUs, colocated"),
        ({"actor-num-gpus-per-node": 4, "colocate": True, "rollout-num-gpus": 8}, "8 GPUs, colocated"),
        ({"actor-num-nodes": 2, "actor-num-gpus-per-node": 8, "rollout-num-gpus": 16}, "32 GPUs"),
        ({"actor-num-gpus-per-node": 8, "rollout-num-gpus": 8, "loss-type": "sft_loss"}, "8 GPUs"),
    ],
)
def test_gpus_of_a_run_file(flags: dict[str, object], words: str) -> None:
    assert gpus(flags) == words


def test_a_copy_has_paths_of_its_own(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "tasks/mine", "--from", "sums"]) == 0
    copy = made / "tasks" / "mine"
    names = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert names == {"README.md", "run.toml", "reward.py", "serve.sh", "data/rows.jsonl", "data/picture.png"}
    assert tomllib.loads((copy / "run.toml").read_text()) == {
        "custom_rm_path": "tasks/mine/reward.py:score",
        "prompt-data": "tasks/mine/data/rows.jsonl",
        "save": "runs/mine",
        "actor-num-nodes": 2,
        "actor-num-gpus-per-node": 8,
        "rollout-num-gpus": 4,
    }
    readme = (copy / "README.md").read_text()
    assert "`tasks/mine/run.toml`, runs/mine/save, not examples/sums-er;" in readme
    assert "[start](../../start.md), [none](../none.md#a), [rows](data/rows.jsonl)" in readme
    assert (copy / "data" / "picture.png").read_bytes() == b"\xff\xfe examples/sums"
    assert (copy / "serve.sh").stat().st_mode & 0o111 and not (copy / "reward.py").stat().st_mode & 0o111
    assert "    tasks/mine/data/rows.jsonl\n" in capsys.readouterr().out


def test_links_out_of_the_recipe_hold_in_a_copy_elsewhere(made: Path) -> None:
    assert main(["new", "mine", "--from", "sums"]) == 0
    assert "[start](../start.md), [none](../none.md#a)" in (made / "mine" / "README.md").read_text()


def test_what_to_do_next_is_printed_as_commands(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (made / "examples" / "sums" / "laptop.toml").write_text(
        'hf-checkpoint = "no/model"\ncustom-rm-path = "examples/sums/reward.py:score"\n'
        'prompt-data = "examples/sums/data/rows.jsonl"\napply-chat-template = true\n'
    )
    assert main(["new", "mine", "--from", "sums"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("wrote mine, from the recipe sums: Sums\n    mine/README.md\n")
    commands = [line.strip() for line in out.splitlines() if line.startswith("    slime-")]
    assert commands == [
        "slime-rollout check-hooks --run --custom-rm-path mine/reward.py:score --prompt-data mine/data/rows.jsonl "
        "--apply-chat-template --reply 'The sun is a big hot ball.'",
        "slime-launch plan --config mine/laptop.toml",
        "slime-launch train --config mine/laptop.toml",
        "slime-launch plan --config mine/run.toml --device h100",
        "slime-launch train --config mine/run.toml",
    ]
    assert "needs no/model" in out and "(20 GPUs)" in out


def test_without_functions_or_a_laptops_file_fewer_steps_are_left(made: Path) -> None:
    assert check_hooks_words({"prompt-data": "rows.jsonl"}) == []
    folder = made / "examples" / "sums"
    (folder / "run.toml").write_text("lr = 1e-6\n")
    steps = [line for line in next_steps(folder) if line[:2] in ("1.", "2.", "3.", "4.")]
    assert len(steps) == 1 and "GPU" in steps[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine", "--from", "sumz"], "there is no recipe sumz; did you mean sums"),
        (["mine", "--from", "quite-different"], "no recipe quite-different; `slime-launch recipes` lists all 2"),
        (["examples", "--from", "sums"], "examples exists already"),
        (["my task", "--from", "sums"], "the name my task must consist of letters, digits"),
        (["..", "--from", "sums"], "the name .. must"),
        ([], "required: NAME"),
        (["mine", "--form", "sums"], "unknown flag --form (did you mean --from?); see slime-launch new --help"),
    ],
)
def test_what_cannot_be_copied_is_one_line(
    words: list[str], message: str, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (made / "mine").exists()


def test_without_recipes_or_with_an_unreadable_one_it_says_so(
    made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (made / "examples" / "sums" / "run.toml").write_text("lr =\n")
    assert main(["recipes"]) == 2
    assert "run.toml cannot be read" in capsys.readouterr().err
    monkeypatch.setattr(new_task, "RECIPES", made / "nothing")
    assert main(["recipes"]) == 2
    assert "holds no recipes" in capsys.readouterr().err


def test_the_package_has_recipes_and_all_are_whole() -> None:
    found = find_recipes()
    assert new_task.DEFAULT in found
    for recipe in found.values():
        assert recipe.title and "GPU" in recipe.where


def test_the_default_recipe_can_be_copied_and_its_reward_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mine"]) == 0
    words = check_hooks_words(run_flags(Path("mine/laptop.toml")))
    assert "mine/reward.py:score" in words
    from slime_rollout.cli import main as slime_rollout

    capsys.readouterr()
    assert slime_rollout(words[1:]) == 0
    assert "ok     --custom-rm-path mine/reward.py:score: the rewards" in capsys.readouterr().out


def test_neither_command_imports_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from slime_launch.cli import main; "
        "sys.exit(main(['recipes']) or main(['new', 'mine']) or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=120).returncode == 0
