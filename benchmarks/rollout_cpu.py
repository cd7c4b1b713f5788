"""CPU time of our process for a sample: a whole rollout through sglang-router and a worker that answers at once.

512 prompts of 8 samples, responses of 200 tokens with log-probs, 512 requests at once: from taking the prompts to the
finished `RolloutBatch` with rewards (`exact`), metrics and the ledger. The router is the real one; router and worker
are other processes and not counted. `rate` is samples a second of wall time, for which all three share the machine.
Medians.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from _records import Record
from _servers import allow_many_connections, instant_server

from slime_rollout.config import RolloutConfig
from slime_rollout.data import PromptDataset, PromptRow, RolloutDataSource, TokenizedPrompt
from slime_rollout.engine.addresses import free_port
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.router import Router
from slime_rollout.rollout import RolloutData, RolloutManager

GOAL_MS = 1.0
PROMPTS, GROUP, TOKENS, PROMPT_TOKENS, CONCURRENT = 512, 8, 200, 100, 512
READY_SECONDS = 60.0


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure a rollout several times, after one that opens connections and fills caches.

    Args:
        out: Directory for the router's log.
        quick: One measured rollout of 32 prompts instead of five of 512.
    """
    allow_many_connections()
    prompts, rounds = (32, 1) if quick else (PROMPTS, 5)
    cpu, rates = [], []
    with instant_server(TOKENS) as worker, router(worker, out / "router.log") as url:
        manager = make_manager(url, prompts)
        for number in range(rounds + 1):
            wall, processor = time.perf_counter(), time.process_time()
            batch = manager.generate(number)
            processor, wall = time.process_time() - processor, time.perf_counter() - wall
            samples = batch.samples
            if len(samples) != prompts * GROUP or any(sample.response_length != TOKENS for sample in samples):
                raise RuntimeError("a rollout is not whole")
            print(f"round {number}: {1e3 * processor / len(samples):.3f} ms of CPU a sample", flush=True)
            if number:
                cpu.append(1e3 * processor / len(samples))
                rates.append(len(samples) / wall)
    case = f"{prompts * GROUP:,} samples of {TOKENS} tokens"
    return [
        Record(case, "CPU", median(cpu), "ms/sample", more_is_better=False, goal=GOAL_MS),
        Record(case, "rate", median(rates), "samples/s", more_is_better=True),
    ]


def make_manager(url: str, prompts: int) -> RolloutManager:
    """A manager of short prompts that are tokenized already."""
    rows = [PromptRow(where="", prompt=f"{place} + 26 =", label=str(place + 26)) for place in range(prompts)]
    dataset = PromptDataset([TokenizedPrompt(row=row, tokens=list(range(PROMPT_TOKENS))) for row in rows])
    config = RolloutConfig.of(
        hf_checkpoint="none",
        prompt_data="none",
        rollout_batch_size=prompts,
        n_samples_per_prompt=GROUP,
        rollout_max_response_len=TOKENS,
        rollout_concurrency=CONCURRENT,
        rm_type="exact",
    )
    data = RolloutData(RolloutDataSource(dataset, samples_per_prompt=GROUP), [], None)
    return RolloutManager(config, router_url=url, run_seed=1, data=data)


@contextlib.contextmanager
def router(worker: str, log: Path) -> Iterator[str]:
    """sglang-router before one worker; gives its address."""
    port = free_port()
    router = Router.start(EngineConfig(), port=port, prometheus_port=free_port(without={port}), log_path=log)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not router.is_ready():
            if time.monotonic() > deadline:
                raise RuntimeError(f"sglang-router is not ready after {READY_SECONDS:g} s; see {log}")
            time.sleep(0.1)
        router.add_workers([worker])
        yield router.url
    finally:
        router.stop()
