"""A run whose prompts are streamed and tokenized ahead: killed and resumed, it goes on with the next prompt."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from ended import end_run, send, trained
from launching import Assets, run, train_command

from slime_rollout.config import RolloutConfig
from slime_rollout.data import PromptEncoder, RolloutDataSource, StreamingPrompts, load_tokenizer
from slime_rollout.store import RolloutStore

ROLLOUTS, BATCH, BLOCK, SEED = 5, 8, 10, 42
FLAGS = ["--streaming-data", "--rollout-shuffle", "--streaming-shuffle-buffer", str(BLOCK), "--num-data-workers", "2"]


@pytest.mark.real
@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_prompts_are_those_of_the_file_each_in_its_turn(qwen3: Assets, tmp_path: Path) -> None:
    command = train_command(
        qwen3, tmp_path, "--save-interval", "2", "--keep-rollouts", *FLAGS, rollouts=ROLLOUTS, colocate=False
    )
    killed = end_run(command, tmp_path, send(signal.SIGKILL), ready=trained(tmp_path, 3))
    assert killed.left == []
    run(command, tmp_path / "resumed.txt")

    store = RolloutStore(tmp_path / "save" / "rollouts")
    groups = [group for number in range(ROLLOUTS) for group in store.read(number).batch().groups]
    assert [group[0].prompt for group in groups] == expected_prompts(qwen3)


def expected_prompts(assets: Assets) -> list[object]:
    """What a stream of the same file gives without processes and without a stop."""
    config = RolloutConfig.of(
        hf_checkpoint=str(assets.hf),
        prompt_data=str(assets.prompts),
        custom_rm_path="slime_rollout.no_rule",  # any label will do, as in the run
        rollout_batch_size=BATCH,
        streaming_data=True,
        rollout_shuffle=True,
        streaming_shuffle_buffer=BLOCK,
    )
    encoder = PromptEncoder.of(config, load_tokenizer(config.data.hf_checkpoint))
    source = RolloutDataSource(StreamingPrompts(config, encoder), samples_per_prompt=1, shuffle=True, seed=SEED)
    return [group[0].prompt for group in source.get_samples(ROLLOUTS * BATCH)]
