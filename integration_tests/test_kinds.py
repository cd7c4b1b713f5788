"""Runs on conversations and on preference pairs learn, without engines; evaluation and generation alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
from kinds import conversation, data_command, make_chat_model, pair, write_rows
from launching import LAUNCHER, Assets, rows, run, train_command

from slime_core.types import RolloutColumns
from slime_launch.config_file import with_config

EXAMPLE = Path(__file__).parents[1] / "examples" / "sft"
TRAINED, HELD_OUT = range(48), range(50, 60)


@pytest.fixture(scope="session")
def chat(llama: Assets, tmp_path_factory: pytest.TempPathFactory) -> Assets:
    """The tiny Llama with a chat template."""
    hf = Path(shutil.copytree(llama.hf, tmp_path_factory.mktemp("chat") / "hf"))
    assets = Assets(hf, llama.torch_dist, llama.prompts, llama.engine_python)
    make_chat_model(assets)
    return assets


def on_data(assets: Assets, work: Path, loss: str, *extra: str, **how: Any) -> str:
    """A run with a held-out set; what it printed."""
    row = conversation if loss == "sft_loss" else pair
    trained = write_rows(work / "train.jsonl", [row(number) for number in TRAINED])
    held_out = write_rows(work / "held.jsonl", [row(number) for number in HELD_OUT])
    words = ("--eval-prompt-data", "held", str(held_out), "--rollout-shuffle", *extra)
    return run(data_command(assets, work, loss, trained, *words, **how), work / "train.txt")


def plain(work: Path, kind: str) -> list[dict[str, Any]]:
    """A run's rows without times and speeds."""
    return [
        {name: value for name, value in row.items() if name != "time" and not name.startswith("perf/")}
        for row in rows(work, kind)
    ]


@pytest.mark.timeout(1200)
def test_conversations_are_learned(chat: Assets, tmp_path: Path) -> None:
    """With packed micro-batches and the loss per token; it knows the answer after two epochs."""
    extra = ("--calculate-per-token-loss", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "64")
    text = on_data(chat, tmp_path, "sft_loss", *extra, "--eval-interval", "6")
    assert "--prompt-data holds conversations, no engines" in text and "loss on held: " in text
    first, half, last = plain(tmp_path, "eval")
    assert first["eval/held/loss"] > 5 > 1.5 > half["eval/held/loss"] > last["eval/held/loss"]
    assert last["eval/held/loss"] < 0.5
    assert plain(tmp_path, "rollout")[5]["rollout/epoch"] == 1
    assert "rollout/raw_reward" not in plain(tmp_path, "rollout")[0]
    logs = {path.name for path in (tmp_path / "out" / "logs").iterdir()}
    assert not [name for name in logs if "engine" in name or "router" in name]
    assert (tmp_path / "out" / "loss_curve.png").exists() and not (tmp_path / "out" / "reward_curve.png").exists()


def recipe(**changes: str) -> list[str]:
    """The flags of examples/sft/run.toml, some replaced."""
    words = with_config(["--config", str(EXAMPLE / "run.toml")]).from_file
    flags = dict(word.partition("=")[::2] for word in words)
    assert set(changes) <= set(flags)
    return [f"{flag}={value}" if value else flag for flag, value in (flags | changes).items()]


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_recipe_of_the_example_scaled_down(chat: Assets, tmp_path: Path) -> None:
    """Its own rows: packed, the longest cut; the rate warms up for a tenth of the steps, and falls to its least."""
    epochs, limit = 8, 70
    words = recipe(**{
        "--hf-checkpoint": str(chat.hf), "--load": str(chat.torch_dist), "--save": str(tmp_path / "save"),
        "--prompt-data": str(EXAMPLE / "conversations.jsonl"), "--num-epoch": str(epochs),
        "--rollout-batch-size": "8", "--global-batch-size": "8", "--max-tokens-per-gpu": "256",
        "--lr": "4e-3", "--min-lr": "4e-4", "--actor-num-gpus-per-node": "1", "--input-key": "messages",
        "--rollout-max-context-len": str(limit), "--output-dir": str(tmp_path / "out"),
    })  # fmt: skip
    run([str(LAUNCHER), "train", *words], tmp_path / "train.txt")
    batches, steps = plain(tmp_path, "rollout"), plain(tmp_path, "train")
    assert len(steps) == len(batches) == epochs * 24 / 8
    cut = [batch["rollout/truncated_ratio"] for batch in batches]
    losses, rates = ([step[f"train/{name}"] for step in steps] for name in ("loss", "lr"))
    print(f"cut: {mean(cut):.2f} of the rows; loss a token: first epoch {mean(losses[:3]):.2f}, last {losses[-3:]}")
    assert 0 < mean(cut) < 1 and max(batch["rollout/total_len/max"] for batch in batches) == limit
    top = rates.index(max(rates))
    assert top == -(-len(steps) // 10)
    assert rates == [*sorted(rates[:top]), *sorted(rates[top:], reverse=True)]
    assert (rates[0], rates[-1]) == (0, pytest.approx(4e-4, rel=0.05))
    assert losses[0] > 5 and mean(losses[-3:]) < 0.4 * mean(losses[:3])


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_stopped_run_on_conversations_continues_bit_equal(chat: Assets, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    on_data(chat, whole, "sft_loss", save=True)
    on_data(chat, parts, "sft_loss", rollouts=5, save=True)
    assert "continuing the run" in on_data(chat, parts, "sft_loss", save=True)
    for kind in ("train", "rollout"):
        found, wanted = ([row | {"samples": None} for row in plain(work, kind)] for work in (parts, whole))
        assert found == wanted  # but for the samples that are shown of each command's last rollout
    assert plain(parts, "eval")[-1] == plain(whole, "eval")[-1]
    one, other = (sorted((work / "save" / "iter_0000012").glob("*.distcp")) for work in (whole, parts))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other] != []


@pytest.mark.timeout(1200)
@pytest.mark.full
@pytest.mark.parametrize("loss", ["dpo_loss", "rm_loss"])
def test_held_out_pairs_are_ordered(chat: Assets, tmp_path: Path, loss: str) -> None:
    on_data(chat, tmp_path, loss)
    first, last = plain(tmp_path, "eval")
    assert first["eval/held/loss"] == pytest.approx(np.log(2), abs=1e-4)
    assert last["eval/held/accuracy"] == 1 and last["eval/held/loss"] < 0.3
    assert plain(tmp_path, "train")[-1]["train/accuracy"] == 1


@pytest.mark.full
@pytest.mark.timeout(600)
def test_evaluation_alone_gives_the_figures_of_a_runs_first_one(qwen3: Assets, tmp_path: Path) -> None:
    """From the trainer's weights, and without a trainer from those of the engines' own directory."""
    held = ["--eval-prompt-data", "held", f"{qwen3.prompts}@[0:16]", "--eval-temperature", "0"]
    run(train_command(qwen3, tmp_path / "run", *held, rollouts=1, save=False), tmp_path / "run.txt")
    expected = plain(tmp_path / "run", "eval")[0]
    for name in ("with trainer", "without"):
        _, _, *words = train_command(qwen3, tmp_path / name, *held, rollouts=3)
        if name == "without":
            at = words.index("--load")
            del words[at : at + 2]
        text = run([str(LAUNCHER), "eval", *words], tmp_path / f"{name}.txt")
        assert plain(tmp_path / name, "eval") == [expected], name
        assert ("no trainers are started" in text) == (name == "without")
        assert not (tmp_path / name / "save").exists() and not plain(tmp_path / name, "train")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_evaluation_of_a_checkpoint_is_that_of_the_run_at_its_step(qwen3: Assets, tmp_path: Path) -> None:
    """Of the newest checkpoint in a directory and of one that is named, which it names; with samples of each set."""
    sets = ["one", f"{qwen3.prompts}@[0:8]", "two", f"{qwen3.prompts}@[8:16]"]
    held = ["--eval-prompt-data", *sets, "--eval-temperature", "0"]
    every = ["--eval-interval", "1", "--save-interval", "1"]
    run(train_command(qwen3, tmp_path / "run", *held, *every, rollouts=2), tmp_path / "run.txt")
    save, wanted = tmp_path / "run" / "save", {row["step"]: row for row in plain(tmp_path / "run", "eval")}
    for step, load in ((2, save), (1, save / "iter_0000001")):
        work = tmp_path / f"step {step}"
        _, _, *words = train_command(qwen3, work, *held, "--load", str(load), rollouts=0, save=False)
        text = run([str(LAUNCHER), "eval", *words], tmp_path / f"{step}.txt")
        assert plain(work, "eval") == [wanted[step]]
        assert f"evaluating {save}/iter_000000{step}, after step {step}" in text
        assert f"eval after step {step}: one " in text and "for example: two: " in text
        assert "--save DIR writes one" not in text


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_generation_alone_writes_what_can_be_trained_on(qwen3: Assets, tmp_path: Path) -> None:
    template = f"{tmp_path}/written/{{rollout_id}}.npz"
    extra = ["--debug-rollout-only", "--save-debug-rollout-data", template]
    text = run(train_command(qwen3, tmp_path, *extra, rollouts=2, save=False), tmp_path / "train.txt")
    assert "no trainers are started" in text and "generated 2 rollouts" in text
    for number in range(2):
        columns = RolloutColumns.read(tmp_path / "written" / f"{number}.npz")
        assert columns.rollout_id == number and columns.group_sizes == [8] * 8
    assert len(list((tmp_path / "out" / "rollouts").glob("*.npz"))) == 2
