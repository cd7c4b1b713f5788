"""Where the quick start's generation goes: seconds a rollout by part of SGLang's scheduler.

The quick start's engine, alone on the machine: 16 prompts of 8 samples, six tokens each. First some rollouts are timed
by the clock, undisturbed (`rollout`). Then py-spy looks 100 times a second at the scheduler's Python stack over further
ones, and each look is counted under the innermost frame of it that belongs to a part; shares of the looks times
`rollout` are the seconds of a part. `waits` is where the scheduler waits for requests, thus for the other processes:
the HTTP server, the router and our client, whose CPU seconds stand with it.

- linear layers: all matrix products but the output layer's
- attention: with writing to the cache
- other layers: norms, rotary embedding, activation
- output layer: logits, which is one matrix product, and choosing the rows
- sampling: with log-probs
- scheduler: all else; batches, the prefix cache, results
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from _quick_start import SEED, prepare
from _records import Record
from quickstart import ENGINE_PYTHON
from quickstart_parts import Places, train_flags

from slime_rollout.config import RolloutConfig
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.http import call
from slime_rollout.rollout import RolloutManager

PROMPTS, RATE, WARM_UP = 16, 100, 2
PARTS = {
    "attention": ("slime_cpu_shims/attention.py", "layers/attention/", "mem_cache/memory_pool.py"),
    "sampling": ("slime_cpu_shims/sampling.py", "layers/sampler.py", "sampling/", "layers/utils/logprob.py"),
    "output layer": ("layers/logits_processor.py",),
    "linear layers": ("layers/linear.py", "layers/quantization/"),
    "other layers": ("layers/", "models/"),
    "waits": ("_recv_reqs", "recv_requests", "maybe_sleep_on_idle", "sleep_on_idle"),
    "scheduler": ("managers/", "model_executor/", "sglang/", "<"),
}
"""By part, what a frame's text holds; the first part that fits a frame takes it."""


def main(out: Path, *, quick: bool) -> list[Record]:
    """Time rollouts, then look into the scheduler during others.

    Args:
        out: Directory for logs and the stacks.
        quick: One rollout of each instead of ten, of a quarter of the prompts.
    """
    rounds = 1 if quick else 10
    places = prepare()
    # As the launcher starts it: with all cores.
    config = EngineConfig(sglang_python=str(ENGINE_PYTHON), engine_threads=len(os.sched_getaffinity(0)))
    with EngineFleet.start(
        config,
        model_path=str(places.hf),
        num_engines=1,
        dtype="bfloat16",
        context_length=None,
        seed=SEED,
        log_dir=out / "logs",
    ) as fleet:
        manager = make_manager(places, fleet.router_url, PROMPTS // 4 if quick else PROMPTS)
        url = fleet.engine_urls[0]
        rollouts(manager, url, range(WARM_UP))
        seconds, other = rollouts(manager, url, range(WARM_UP, WARM_UP + rounds))
        stacks = out / "stacks.txt"
        watcher = start_py_spy(scheduler_of(fleet), stacks)
        rollouts(manager, url, range(WARM_UP + rounds, WARM_UP + 2 * rounds))
        watcher.send_signal(signal.SIGINT)
        watcher.wait(60)
    shares = shares_of(stacks.read_text())
    records = [Record("rollout", "time", median(seconds), "s", more_is_better=False)]
    records += [Record(part, "time", shares[part] * median(seconds), "s", more_is_better=False) for part in PARTS]
    return [*records, Record("client", "CPU", other, "s/rollout", more_is_better=False)]


def make_manager(places: Places, url: str, prompts: int) -> RolloutManager:
    """A manager of the quick start's problems with its settings, but for the prompts of a rollout."""
    flags = train_flags(places, engine_python=ENGINE_PYTHON, seed=SEED, steps=1)
    config = RolloutConfig.of(
        hf_checkpoint=str(places.hf),
        prompt_data=str(places.train_data),
        input_key="prompt",
        label_key="label",
        rollout_batch_size=prompts,
        n_samples_per_prompt=int(flags["--n-samples-per-prompt"][0]),
        rollout_max_response_len=int(flags["--rollout-max-response-len"][0]),
        rm_type=flags["--rm-type"][0],
    )
    return RolloutManager(config, router_url=url, run_seed=SEED)


def rollouts(manager: RolloutManager, engine: str, numbers: Sequence[int]) -> tuple[list[float], float]:
    """Seconds of each rollout, and this process's CPU seconds of one. Before each the prefix cache is dropped."""
    seconds = []
    processor = time.process_time()
    for number in numbers:
        call("POST", f"{engine}/flush_cache", {})  # as new weights do
        started = time.perf_counter()
        manager.generate(number)
        seconds.append(time.perf_counter() - started)
        print(f"rollout {number}: {seconds[-1]:.2f} s", flush=True)
    return seconds, (time.process_time() - processor) / len(numbers)


def scheduler_of(fleet: EngineFleet) -> int:
    """Process id of the engine's scheduler."""
    for pid in next(iter(fleet.process_ids().values())):
        if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise RuntimeError("no process of the engine calls itself a scheduler")


def start_py_spy(pid: int, stacks: Path) -> subprocess.Popen[bytes]:
    """py-spy, which writes the stacks when it is interrupted."""
    program = Path(sys.executable).with_name("py-spy")  # slime-launch needs it, too
    words = ["record", "--pid", str(pid), "--rate", str(RATE), "--format", "raw", "--output", str(stacks), "--idle"]
    return subprocess.Popen([str(program), *words, "--full-filenames", "--duration", "unlimited"])


def shares_of(stacks: str) -> dict[str, float]:
    """Part → its share of the main thread's looks, from py-spy's lines of `frame;frame;… count`."""
    counts: Counter[str] = Counter()
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        if "event_loop" in stack:
            counts[part_of(stack.split(";"))] += int(count)
    total = sum(counts.values())
    return {part: counts[part] / total for part in PARTS}


def part_of(frames: Sequence[str]) -> str:
    """The part that a stack belongs to; its innermost frame comes last."""
    for frame in reversed(frames):
        for part, texts in PARTS.items():
            if any(text in frame for text in texts):
                return part
    return "scheduler"
