"""Completion of commands, flags and values in a shell."""

import shutil
import subprocess

from slime_launch.cli import main


def complete(script, *words, shell="bash"):
    state = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}"
    program = f'{script}\n{state}; _slime_launch\necho "${{COMPREPLY[@]}}"'
    done = subprocess.run([shell, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    return done.stdout.split()


def test_completion_in_bash(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert complete(script, "slime-launch", "tr") == ["train", "train-async"]
    assert complete(script, "slime-launch", "train", "--num-r") == ["--num-rollout"]
    assert complete(script, "slime-launch", "train", "--kl-loss-type", "low") == ["low_var_kl"]
    assert complete(script, "slime-launch", "completion", '""') == ["bash", "zsh"]
    assert complete(script, "slime-launch", "plan", "--gpus-per") == ["--gpus-per-node"]
    assert complete(script, "slime-launch", "train", "--gpus-per") == []


def test_completion_in_zsh(capsys):
    assert main(["completion", "zsh"]) == 0
    script = capsys.readouterr().out
    assert "--kl-loss-type) compadd -- " in script
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n"], input=script, text=True, timeout=240, check=True)


def test_completion_of_another_shell(capsys):
    assert main(["completion", "fish"]) == 2
    assert "allowed: bash, zsh" in capsys.readouterr().err
