"""The way of a prompt: files of ours that one rollout enters, in order, and the calls down to its HTTP request.

Run it with an environment that has slime-rollout: `python scripts/way.py`. The engine is the one that
`check-hooks --run` uses, so no model is needed; everything else is what a run uses. A call that creates a task counts
together with the task. The launcher adds `loop.py`, `rollouts.py`, `remote.py` and `calls.py` above it.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime_rollout.config import RolloutConfig
from slime_rollout.data import PromptDataset, PromptEncoder, RolloutDataSource
from slime_rollout.engine.config import EngineConfig
from slime_rollout.generation_service import GenerationService
from slime_rollout.hooks.contracts import StandInEngine, make_tokenizer, write_prompts
from slime_rollout.rollout import RolloutData, RolloutManager
from slime_rollout.serving_engines import GenerationSpec
from slime_rollout.threads import LoopThread

PACKAGES = Path(__file__).resolve().parents[1] / "packages"
PLUMBING = ("threads.py", "scripts/way.py")
REQUEST = "exchange"


class Way:
    """Notes files as they are entered, and the longest chain of calls that ends in a request."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.calls: list[str] = []
        self._parents: dict[asyncio.Task[Any], list[str]] = {}

    def profile(self, frame: types.FrameType, event: str, _: Any) -> None:
        """For `sys.setprofile`."""
        if event != "call" or not (file := own(frame)):
            return
        self.files.setdefault(file)
        if frame.f_code.co_name == REQUEST and len(chain := self.chain(frame)) > len(self.calls):
            self.calls = chain

    def chain(self, frame: types.FrameType | None) -> list[str]:
        """The calls above a frame, over the borders of tasks."""
        calls = [f"{Path(own(one)).stem}.{one.f_code.co_qualname}" for one in stack(frame) if own(one)][::-1]
        try:
            task = asyncio.current_task()
        except RuntimeError:
            return calls
        return (self._parents.get(task, []) if task is not None else self.chain_of_caller()) + calls

    def chain_of_caller(self) -> list[str]:
        """The calls of the main thread, which waits for the event loop."""
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return [f"{Path(own(one)).stem}.{one.f_code.co_qualname}" for one in stack(frame) if own(one)][::-1]

    def make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **more: Any) -> asyncio.Task[Any]:
        """A task factory that remembers who created a task."""
        task = asyncio.Task(coro, loop=loop, **more)
        self._parents[task] = self.chain(sys._getframe(1))
        return task


def stack(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """A frame and those above it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def own(frame: types.FrameType) -> str:
    """The file of a frame if it is ours and does more than pass calls on; otherwise empty."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(PACKAGES) or path.name in PLUMBING or frame.f_code.co_name.startswith("<"):
        return ""
    return str(path.relative_to(PACKAGES))


def main() -> None:
    """Print the way of one rollout of four samples."""
    tokenizer, way, engine_thread = make_tokenizer(), Way(), LoopThread("engine")
    with tempfile.TemporaryDirectory() as directory:
        prompts = write_prompts(Path(directory) / "prompts.jsonl", chat=False)
        config = RolloutConfig.of(
            hf_checkpoint="", prompt_data=prompts, rollout_batch_size=2, n_samples_per_prompt=2, rm_type="first_integer"
        )
        dataset = PromptDataset.load(prompts, config, PromptEncoder.of(config, tokenizer))
    source = RolloutDataSource(dataset, samples_per_prompt=2)
    serving = StandInEngine(tokenizer, ["4"]).serve()
    url = engine_thread.run(serving.__aenter__())
    spec = GenerationSpec(
        engine=EngineConfig(), rollout=config, num_engines=1, num_gpus=1, topology=None, dtype="float32",
        context_length=None, seed=1, log_dir="", flags={},
    )  # fmt: skip
    service = GenerationService(spec)
    manager = RolloutManager(config, router_url=url, run_seed=1, data=RolloutData(source, [], tokenizer))
    service.engines.generator, thread = manager, manager._thread
    thread._loop.set_task_factory(way.make_task)
    thread.run(profiled(way))
    sys.setprofile(way.profile)
    service.engines.version = 1
    service.generate(0)
    sys.setprofile(None)
    thread.run(profiled(None))
    service.close()
    engine_thread.run(serving.__aexit__(None, None, None))
    for number, file in enumerate(way.files, 1):
        print(f"{number:>3} {file}")
    print(f"{len(way.files)} files; {len(way.calls)} calls: {' -> '.join(way.calls)}")


async def profiled(way: Way | None) -> None:
    """Have the running thread profiled, or no more."""
    sys.setprofile(way.profile if way is not None else None)


if __name__ == "__main__":
    main()
