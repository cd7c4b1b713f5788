"""Commands of a rank for tests: what it saves, how saving fails, and what it holds then."""

import resource
import shutil
import threading
from pathlib import Path


class Checkpoints:
    """Of the rank's worker."""

    worker = None

    def save(self, iteration):
        return self.worker.save(iteration)

    def saved(self, wait=False):
        return self.worker.saved(wait)

    def finish_loading(self):
        self.worker.finish_loading()

    def has_left(self):
        """Whether a part of a checkpoint is left for later, and whether there is an optimizer."""
        return [self.worker._roles._left is not None, "_optimizer" in vars(self.worker._roles.actor)]

    def joins_while_loading(self, directory):
        """How often tensors are joined into a new one while the rank's worker loads a checkpoint."""
        import torch

        join, joined = torch.cat, []
        torch.cat = lambda *args, **kwargs: joined.append(args) or join(*args, **kwargs)
        try:
            self.worker.load(directory)
        finally:
            torch.cat = join
        return len(joined)

    def hold_saves(self, at="_write"):
        """Have what writes in the background wait before a step of it until it may go on."""
        from slime_megatron.checkpoints import writer as checkpoint_writer

        step, self._step, self._may_write = getattr(checkpoint_writer, at), at, threading.Event()
        self._is_held = threading.Event()

        def held(*args):
            self._is_held.set()
            self._may_write.wait()
            return step(*args)

        setattr(checkpoint_writer, at, held)
        self._held_step = step

    def wait_until_held(self):
        assert self._is_held.wait(60)

    def let_saves_go(self):
        from slime_megatron.checkpoints import writer as checkpoint_writer

        setattr(checkpoint_writer, self._step, self._held_step)
        self._may_write.set()

    def leave_no_memory(self):
        """Have the machine say once that nothing of its memory is left; a save that is held goes on then."""
        from slime_megatron.checkpoints import background

        spare_memory = background.spare_memory

        def none_left():
            background.spare_memory = spare_memory  # the process serves other tests, too
            self.let_saves_go()
            return 0

        background.spare_memory = none_left

    def is_released(self):
        """Whether what is written in the background was copied, because it was to change."""
        return self.worker._roles._background._live._is_released

    def save_as_before(self, iteration):
        """Save as slime did when it knew tensor and data parallelism alone: random states by tensor rank."""
        import dataclasses

        from megatron.core import parallel_state

        from slime_megatron.checkpoints import contents as checkpoint_io

        random_state, arguments = checkpoint_io._random_state, checkpoint_io._arguments

        def by_tensor_rank():
            size = parallel_state.get_tensor_model_parallel_world_size()
            rank = parallel_state.get_tensor_model_parallel_rank()
            return dataclasses.replace(random_state(), global_shape=(size,), global_offset=(rank,))

        def without_context_parallelism(*given):
            new = ("context_parallel_size", "random_states")
            return {name: value for name, value in arguments(*given).items() if name not in new}

        checkpoint_io._random_state, checkpoint_io._arguments = by_tensor_rank, without_context_parallelism
        try:
            return self.worker.save(iteration)
        finally:
            checkpoint_io._random_state, checkpoint_io._arguments = random_state, arguments

    def save_legacy(self, root, more=None):
        """Write what Megatron-LM does with ``--ckpt-format torch``: each rank its part, and an optimizer's state."""
        import argparse

        import torch
        from megatron.core import parallel_state as ps

        config = self.worker.config
        experts, stages = ps.get_expert_model_parallel_world_size(), ps.get_pipeline_model_parallel_world_size()
        sizes = ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
        args = argparse.Namespace(
            **self.worker.shape.to_megatron_args(),
            **{f"{name}_parallel_size": getattr(config, f"{name}_parallel_size") for name in sizes},
            **(more or {}),
        )
        place = f"mp_rank_{ps.get_tensor_model_parallel_rank():02d}"
        place += f"_{ps.get_pipeline_model_parallel_rank():03d}" if stages > 1 else ""
        place += f"_{ps.get_expert_model_parallel_rank():03d}" if experts > 1 else ""
        directory = Path(root) / "iter_0000012" / place
        directory.mkdir(parents=True)
        chunks = [chunk.state_dict() for chunk in self.worker.model]
        models = {f"model{number if len(chunks) > 1 else ''}": chunk for number, chunk in enumerate(chunks)}
        others = {"args": args, "checkpoint_version": 3.0, "iteration": 12, "optimizer": {"state": torch.ones(3)}}
        torch.save(others | models, directory / "model_optim_rng.pt")
        (Path(root) / "latest_checkpointed_iteration.txt").write_text("12")

    def spoil(self, name):
        """Put a NaN into a weight, on ranks that have it."""
        import torch

        from slime_megatron.model.build import named_weights

        with torch.no_grad():
            for own, weight in named_weights(self.worker.model):
                if own == name:
                    weight[0, 0] = torch.nan

    def bytes_read(self, directory):
        """Bytes of the files that are read when a Hugging Face directory is loaded once more."""
        from slime_convert.files.reading import TensorReader
        from slime_megatron.checkpoints.contents import load_weights
        from slime_megatron.checkpoints.find import find_checkpoint

        read, count = TensorReader._read, []

        def counted(reader, source, start, target):
            count.append(len(target))
            read(reader, source, start, target)

        TensorReader._read = counted
        try:
            load_weights(find_checkpoint(directory), self.worker.shape, self.worker.model)
        finally:
            TensorReader._read = read
        return sum(count)

    def hashes(self):
        """Of this rank's weights, of its optimizer's state, and of its random states."""
        import hashlib
        import random

        import numpy as np
        import torch
        from megatron.core import tensor_parallel

        def of(tensors):
            found = hashlib.sha256()
            for tensor in tensors:
                found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
            return found.hexdigest()

        worker = self.worker
        weights = [tensor for chunk in worker.model for tensor in (*chunk.parameters(), *chunk.buffers())]
        states = [
            tensor
            for part in worker._roles.actor.optimizer.chained_optimizers
            for group in part.optimizer.param_groups
            for param in group["params"]
            for tensor in (param, *(value.reshape(-1) for _, value in sorted(part.optimizer.state[param].items())))
        ]
        trackers = tensor_parallel.get_cuda_rng_tracker().get_states()
        chance = [torch.get_rng_state(), torch.cuda.get_rng_state(), *trackers.values()]
        others = hashlib.sha256(repr((random.getstate(), np.random.get_state())).encode()).hexdigest()
        return of(weights), of(states), of(chance), others

    def save_on_a_full_disk(self, iteration, full_rank, free=None):
        """Save while one rank can write only the first few kilobytes of a file; ``free`` bytes are said to be left."""
        import torch.distributed as dist

        old, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == full_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
        usage = shutil.disk_usage
        if free is not None:
            shutil.disk_usage = lambda path: usage(path)._replace(free=free)
        try:
            directory = self.worker.save(iteration)
            if self.worker._roles._background is not None and self.worker._roles._background._thread is not None:
                self.worker._roles._background._thread.join()
            return directory
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            shutil.disk_usage = usage
            resource.setrlimit(resource.RLIMIT_FSIZE, (old, hard))
