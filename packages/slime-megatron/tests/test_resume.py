"""A run that is killed continues, in fresh processes, bit for bit as one that was not."""

import contextlib
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from slime_core.config import AlgorithmConfig
from slime_megatron.checkpoints.find import TRACKER, find_checkpoint
from support.layouts import LAYOUTS

GRPO = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")
ROLLOUTS = 3
KINDS = [
    ("llama-tied/4", "pp2+vpp2", {"use_distributed_optimizer": True}),
    ("qwen3-moe/4", "ep2", {"bf16": True, "async_save": True}),
    ("llama-tied/4", "cp2", {}),
    ("glm4-moe/4", "tp2+sp", {"use_distributed_optimizer": True, "bf16": True, "async_save": True}),
    ("deepseek-mtp/4", "ep2", {"bf16": True, "async_save": True}),
]
POINTS = range(10)


class Job:
    """A run of a few rollouts with a checkpoint after each."""

    def __init__(self, ranks, model, tiny_config, make_samples, make_shards, kind, save):
        _, layout, values = kind
        self.ranks, self.model = ranks, model
        self.world, settings, self._micro, *_ = LAYOUTS[layout]
        self.config = tiny_config(load=model.checkpoint, save=str(save), lr_warmup_iters=3, **settings, **values)
        self._samples, self._shards = make_samples, make_shards

    def go_on(self):
        """From the newest checkpoint, or the start, to the end; every rank's hashes then."""
        save = Path(self.config.save)
        resume_from = str(save) if (save / TRACKER).exists() else None
        self.ranks.start(self.world, self.config, self.model.shape, GRPO, resume_from=resume_from)
        for rollout in range(self.ranks.iteration or 0, ROLLOUTS):
            shards = self._shards(
                self._samples(seed=rollout),
                data_parallel=self.config.data_parallel_size(self.world),
                micro_batch_size=self._micro,
                steps=2,
                rollout_id=rollout,
            )
            self.ranks.call("train", shards)
            self.ranks.call("random_numbers")
            self.ranks.call("save", rollout + 1)
        self.ranks.call("saved", wait=True)
        return self.ranks.call("hashes")


@pytest.fixture(scope="module")
def uninterrupted(rank_group, tiny_model, tiny_config, make_samples, make_shards, tmp_path_factory):
    """A kind's hashes at the end of a run that nothing stopped, and how long it took."""
    made = {}

    def run(number):
        if number not in made:
            kind, pool = KINDS[number], []
            save = tmp_path_factory.mktemp("run")
            job = Job(rank_group(pool), tiny_model(kind[0]), tiny_config, make_samples, make_shards, kind, save)
            start = time.monotonic()
            made[number] = job.go_on(), time.monotonic() - start
            job.ranks.close()
            for member in pool:
                member.stop()
        return made[number]

    return run


def kill_later(pool, save, point, seconds):
    """Kill all ranks at a random moment of the run; at every other point, inside one of its saves."""
    chance = random.Random(point)
    ended = threading.Event()

    def kill():
        ended.wait(chance.uniform(0.3, 0.9) * seconds)
        while point % 2 and not ended.is_set() and not any(save.glob("*.tmp")):
            ended.wait(0.0005)
        ended.wait(chance.uniform(0, 0.05))
        for member in pool:
            member.process.send_signal(signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread, ended


@pytest.mark.full
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_run_continues_as_if_it_had_not_been(
    rank_group, uninterrupted, tiny_model, tiny_config, make_samples, make_shards, tmp_path, point
):
    number = point % len(KINDS)
    expected, seconds = uninterrupted(number)
    kind, pool, model = KINDS[number], [], tiny_model(KINDS[number][0])
    job = Job(rank_group(pool), model, tiny_config, make_samples, make_shards, kind, tmp_path)
    job.ranks._recruit(job.world)
    thread, ended = kill_later(list(pool), tmp_path, point, seconds)
    with contextlib.suppress(RuntimeError, OSError):
        job.go_on()
    ended.set()
    thread.join()
    job.ranks._abandon()
    if (tmp_path / TRACKER).exists():
        assert find_checkpoint(tmp_path).iteration in range(1, ROLLOUTS + 1)
    try:
        assert job.go_on() == expected
        assert not any(tmp_path.glob("*.tmp"))
    finally:
        job.ranks.close()
        for member in pool:
            member.stop()


def test_random_states_that_an_older_slime_saved_are_named(
    ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path
):
    """They lie by tensor-parallel rank alone. All else continues."""
    model = tiny_model("qwen3")
    config = tiny_config(load=model.checkpoint, save=str(tmp_path))
    shards = make_shards(make_samples())
    ranks.start(1, config, model.shape)
    ranks.call("save_as_before", 1)
    expected = ranks.first("train", shards).steps
    ranks.start(1, config, model.shape, resume_from=str(tmp_path))
    assert ranks.iteration == 1
    assert ranks.first("train", shards).steps == expected
    assert "an older slime saved no random states that fit" in ranks.first("warnings")[-1]
