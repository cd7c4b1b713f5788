"""A trainer rank in a process of its own, for tests: takes commands from a pipe, holds one worker at a time.

rank_template.py starts it. A command is ``(name, args, kwargs)``; the answer is ``("ok", value)`` or
``("error", type, text)``.
"""

import contextlib
import dataclasses
import faulthandler
import gc
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from pathlib import Path

from rank_checkpoints import Checkpoints
from rank_collectives import Collectives
from rank_gradients import whole_gradient
from rank_host import HostOptimizer
from rank_te import TELayers
from rank_weights import WeightChecks


class Channel:
    """A weight channel that keeps what it is sent, or refuses a call."""

    def __init__(self, refused=None):
        self.refused = refused
        self.events = []
        self.tensors = {}

    def refuse(self, call):
        if call == self.refused:
            from slime_core.errors import SlimeError

            raise SlimeError(f"no {call}")

    def begin(self, update):
        self.refuse("begin")
        self.events.append(("begin", update.version))

    def send(self, bucket):
        self.refuse("send")
        whole = sum(tensor.nbytes for _, tensor in bucket)
        self.events.append(("send", whole))
        self.tensors.update({name: tensor.clone() for name, tensor in bucket})
        return 2 * whole  # what a channel sends need not be what the tensors have

    def end(self):
        self.refuse("end")
        self.events.append(("end",))


class Rank(Checkpoints, Collectives, TELayers, HostOptimizer, WeightChecks):
    """The commands."""

    worker = None

    def __init__(self):
        self.records = []
        handler = logging.StreamHandler()
        handler.emit = lambda record: self.records.append(record.getMessage())
        logging.getLogger("slime_megatron").addHandler(handler)

    def warnings(self):
        """What the worker has logged since it was built."""
        return self.records

    def build(self, config, algorithm, shape, rendezvous, **how):
        from slime_core.interfaces import TrainerWorker
        from slime_megatron.service import start_worker

        self.records.clear()
        self.worker = start_worker(config, algorithm, shape, rendezvous, **how)
        assert isinstance(self.worker, TrainerWorker)
        return self.worker._roles.iteration

    def build_in(self, memory_bytes, config, algorithm, shape, take_turns, rendezvous):
        """Build a worker on a device of so much memory."""
        from unittest import mock

        from slime_megatron.ranks import device

        found = dataclasses.replace(device.select_device(1), memory_bytes=memory_bytes)
        with mock.patch.object(device, "select_device", return_value=found):
            self.build(config, algorithm, shape, rendezvous, take_turns=take_turns)

    def close(self):
        if self.worker is not None:
            worker, self.worker = self.worker, None
            worker.close()
            del worker
            gc.collect()  # hooks of its buffers hold it in circles, and it holds process groups, which have threads

    def leave(self):
        """Leave the process groups after an error, as far as the ranks got to build them."""
        self.worker = None
        gc.collect()
        parallel = sys.modules.get("slime_megatron.ranks.parallel")  # absent if the device was not even selected
        if parallel is not None and parallel.dist.is_initialized():
            parallel.leave_ranks()

    def train(self, shards):
        """Several shards, one per data-parallel rank: this rank takes its own."""
        return self.worker.train(shards[self.worker.data_parallel_rank])

    def megatron_settings(self, names):
        """Fields of Megatron's configs: the model's, the gradient buffers', the optimizer's."""
        actor = self.worker._roles.actor
        configs = (actor.model[0].config, actor.wrapped[0].ddp_config, actor.optimizer.config)
        return {name: next(getattr(one, name) for one in configs if hasattr(one, name)) for name in names}

    def megatron_dataclasses(self):
        """The default of every field of core's configs, "?" where it is not a plain value."""
        import dataclasses

        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer import MLATransformerConfig, TransformerConfig

        found = {}
        for kind in (OptimizerConfig, DistributedDataParallelConfig, MLATransformerConfig, TransformerConfig):
            for field in dataclasses.fields(kind):
                made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
                found[field.name] = made if made is None or type(made) in (bool, int, float, str, list) else "?"
        return found

    def megatron_settings_on_a_gpu(self, names):
        """The same, as they would be on one."""
        import torch

        from slime_megatron.model import megatron_configs
        from slime_megatron.ranks.device import Device

        worker, gpu = self.worker, Device(torch.device("cuda", 0), "nccl", lambda: None, 1)
        given = (worker.shape, worker.config, gpu)
        configs = (megatron_configs.transformer_config(*given), megatron_configs.ddp_config(*given))
        return {name: next(getattr(one, name) for one in configs if hasattr(one, name)) for name in names}

    def is_deterministic(self):

        import torch

        return torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"

    def train_and_fail(self, shards):
        """What the error says, and whether the weights are as before."""
        import numpy as np

        from slime_megatron.errors import TrainingError

        before = self.weights()
        try:
            self.train(shards)
        except TrainingError as error:
            after = self.weights()
            return str(error), all(np.array_equal(after[name], before[name]) for name in before)
        return None

    def evaluate(self, shards):
        return self.worker.evaluate(shards[self.worker.data_parallel_rank])

    def forward(self, shards, role="actor"):
        return self.worker.forward(shards[self.worker.data_parallel_rank], role)

    def error_of_training(self, shards):
        return self.error_of("train", shards)

    def error_of(self, command, *args):
        """The error of a command; the ranks can go on after it."""
        try:
            getattr(self, command)(*args)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def push(self, version):
        from slime_core.types import WeightUpdate

        channel = Channel()
        report = self.worker.push(WeightUpdate(version=version), channel)
        return report, channel.events, _plain(channel.tensors)

    def push_from(self, senders, refused_by, call="send"):
        """Push from some ranks, of which one has a channel that refuses a call: the error, or what was sent here."""
        import torch.distributed as dist

        from slime_core.errors import SlimeError
        from slime_core.types import WeightUpdate

        channel = Channel(call if dist.get_rank() == refused_by else None) if dist.get_rank() in senders else None
        try:
            report = self.worker.push(WeightUpdate(version=4), channel, senders)
        except SlimeError as error:
            return str(error)
        return report.tensors, {} if channel is None else _plain(channel.tensors)

    def push_to_file(self, path):
        """Push, and save what rank 0 has sent."""
        from safetensors.torch import save_file

        from slime_core.types import WeightUpdate

        channel = Channel()
        report = self.worker.push(WeightUpdate(version=1), channel)
        if channel.tensors:
            save_file({name: tensor.contiguous() for name, tensor in channel.tensors.items()}, path)
        return report

    def gathers_while_sending(self):
        """Whether the next bucket is gathered before the first is sent."""
        from slime_core.types import WeightUpdate
        from slime_megatron.weights.sync import WeightExport, push_weights

        export = WeightExport(self.worker.model, self.worker.shape)
        gathered = threading.Event()
        seen = []

        class Watched:
            def tensors(self, root):
                for number, tensor in enumerate(export.tensors(root)):
                    if number == 2:  # the first bucket holds tensor 0, and was complete at tensor 1
                        gathered.set()
                    yield tensor

        class Waiting(Channel):
            def send(self, bucket):
                seen.append(gathered.wait(20))
                return super().send(bucket)

        push_weights(Watched(), Waiting(), WeightUpdate(version=1), 1)
        return seen[0]

    def set_weights(self, tensors):
        """Load a whole model, given under Megatron names, by this rank's part of it."""
        import torch
        from megatron.core import parallel_state

        from slime_convert.mapping import WeightMap
        from slime_megatron.model.build import named_weights

        trainer = self.worker
        weight_map = WeightMap(trainer.shape)
        rank, world = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
        with torch.no_grad():
            for name, param in named_weights(trainer.model):
                full = torch.from_numpy(tensors[name])
                param.copy_(weight_map.split_tp(name, full, world)[rank] if world > 1 else full)
        trainer._roles.actor.optimizer.reload_model_params()

    def logits(self, samples, share_prompts="off"):
        """Logits of every position that predicts a response token; whole vocabulary."""
        import torch
        import torch.distributed as dist
        from megatron.core import parallel_state

        from slime_megatron.model.build import output_weight

        trainer = self.worker
        sequence_parallel = trainer.config.tensor_model_parallel_size if trainer.config.sequence_parallel else 1
        batch = packed(samples, share_prompts, sequence_parallel)
        with torch.no_grad():
            local = (hidden(trainer.model[0], batch) @ output_weight(trainer.model[0]).t()).float()
        group = parallel_state.get_tensor_model_parallel_group()
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local, group=group)
        return torch.cat(parts, dim=-1)[:, : trainer.shape.vocab_size].numpy()

    def gradients(self, samples, temperature, through_logits):
        """Log-probs, entropies, and the gradient of their weighted sum, by parameter."""
        import torch
        from megatron.core import parallel_state

        from slime_core.ops import log_probs_and_entropy
        from slime_megatron.model.build import output_weight, run
        from slime_megatron.step.passes import Head

        trainer = self.worker
        model = trainer.model[0]
        multiple_of = trainer.config.tensor_model_parallel_size
        batch = packed(samples, "on", multiple_of)
        trainer._roles.actor.wrapped[0].zero_grad_buffer()
        if through_logits:
            from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

            rows = copy_to_tensor_model_parallel_region(hidden(model, batch))
            log_probs, entropy = log_probs_and_entropy(
                rows @ output_weight(model).t(),
                batch.targets_M,
                temperature=temperature,
                group=parallel_state.get_tensor_model_parallel_group(),
                vocab_size=trainer.shape.vocab_size,
                with_entropy=True,
            )
        else:
            chunk = trainer._roles.actor.wrapped[0]
            head = Head(vocab_size=trainer.shape.vocab_size, temperature=temperature)
            log_probs, entropy = head(chunk, run(chunk, batch), batch, with_entropy=True)
        upstream = torch.linspace(-1, 1, len(log_probs))
        (log_probs @ upstream + 0.3 * entropy @ upstream.flip(0)).backward()
        grads = {name: param.main_grad for name, param in model.named_parameters()}
        return _plain({"log_probs": log_probs, "entropy": entropy}), _plain(grads)

    def peak_of_training(self, shards):
        """Bytes by which this process grew at most while it trained."""
        import ctypes

        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far (proc(5))
        before = _status("VmRSS")
        self.train(shards)
        return _status("VmHWM") - before

    def train_and_watch_packing(self, shards):
        """Train; how many batches were packed by each model, and how many of them were alive at once at most."""
        import weakref

        from slime_megatron.model.packing import MicroBatch

        pack, alive, most, models = MicroBatch.pack, [], [], {"packed": 0}

        def watched(batch, device=None, **how):
            packed = pack(batch, device, **how)
            alive[:] = [reference for reference in alive if reference() is not None]
            alive.append(weakref.ref(packed.tokens_T))
            most.append(len(alive))
            return packed

        model = self.worker.model[0]
        hook = model.register_forward_hook(lambda *call: models.update(actor=models.get("actor", 0) + 1))
        MicroBatch.pack = watched
        try:
            report = self.train(shards)
        finally:
            MicroBatch.pack = pack
            hook.remove()
        return report, len(most), max(most), models["actor"]

    def load(self, directory):
        return self.worker.load(directory)

    def sleep(self, keep_weights=False):
        """Sleep; the report, with the bytes of this process that were given back as ``freed``."""
        from slime_megatron.weights.offload import resident_bytes

        before = resident_bytes(self.worker._roles._device)
        report = self.worker.sleep(keep_weights)
        return report, before - report.resident

    def wake(self, weights_only=False):
        self.worker.wake(weights_only)

    def role_bytes(self):
        """Bytes of the tensors of each trained role, the critic first."""
        from slime_megatron.weights.offload import unique_storages

        def size(model):
            parts = (model.weights(), model.gradients(), model.optimizer_state())
            return sum(storage.nbytes() for part in parts for storage in unique_storages(part))

        return [size(model) for model in self.worker._roles.trained]

    def freed_by_waiting(self):
        """Bytes of this process that a critic gives back which waits as it does when the actor works."""
        from slime_megatron.weights.offload import resident_bytes

        self.worker._roles.critic.wake()
        before = resident_bytes(self.worker._roles._device)
        self.worker._roles.critic.sleep()
        return before - resident_bytes(self.worker._roles._device)

    def error_of_sleep_on_a_full_disk(self):
        from unittest import mock

        with mock.patch("os.posix_fallocate", side_effect=OSError(28, "No space left on device")):
            return self.error_of("sleep")

    def held(self):
        """Checksums of weights and optimizer state, and bytes of them and of the gradients."""
        import torch

        from slime_megatron.weights.offload import unique_storages

        tensors = list(self.worker._roles.device_tensors())
        gradients = unique_storages(tensor for model in self.worker._roles.trained for tensor in model.gradients())
        # Of copies: a storage that NumPy has seen cannot be emptied.
        copies = (tensor.detach().contiguous().view(-1).view(torch.uint8).clone() for tensor in tensors)
        return (
            [hash(copy.numpy().tobytes()) for copy in copies],
            sum(storage.nbytes() for storage in unique_storages(tensors)),
            sum(storage.nbytes() for storage in gradients),
        )

    def attention_calls(self, shards):
        """Train, and count how often a core attention was computed."""
        from slime_megatron.model.attention import PackedAttention

        calls = []
        layers = [module for module in self.worker.model[0].modules() if isinstance(module, PackedAttention)]
        hooks = [layer.register_forward_hook(lambda *call: calls.append(1)) for layer in layers]
        self.train(shards)
        for hook in hooks:
            hook.remove()
        return len(calls)

    def train_and_watch_gradients(self, shards, mutation=None):
        """Train; the report, and each step's reduced gradients, whole and under Hugging Face names, on rank 0.

        With a mutation, something between the ranks is broken meanwhile.
        """
        from mutations import MUTATIONS

        from slime_megatron.weights import sync

        worker, named, seen = self.worker, sync.named_weights, []
        take_step = worker._roles.actor.optimizer.step

        def gradients(chunks):
            for name, weight in named(chunks):
                if hasattr(weight, "main_grad"):
                    grad = whole_gradient(worker._roles.actor.optimizer, name, weight)
                    grad.tensor_model_parallel = getattr(weight, "tensor_model_parallel", False)
                    yield name, grad

        def step():
            sync.named_weights = gradients
            try:
                seen.append(_plain(dict(sync.WeightExport(worker.model, worker.shape).tensors())))
            finally:
                sync.named_weights = named
            return take_step()

        worker._roles.actor.optimizer.step = step
        try:
            with MUTATIONS[mutation](worker) if mutation else contextlib.nullcontext():
                return self.train(shards), seen
        finally:
            worker._roles.actor.optimizer.step = take_step

    def train_and_watch_the_optimizer(self, shards):
        """Train; the fp32 and the model's weights at first, and gradients and both weights of each optimizer step."""
        trainer = self.worker
        params = dict(trainer.model[0].named_parameters())
        optimizer, take_step = trainer._roles.actor.optimizer, trainer._roles.actor.optimizer.step
        seen = []

        def weights():
            masters = {name: getattr(param, "main_param", param) for name, param in params.items()}
            return _plain(masters), _plain(params)

        def step():
            grads = _plain({name: param.main_grad for name, param in params.items() if param.requires_grad})
            result = take_step()
            seen.append((grads, *weights()))
            return result

        first = weights()
        optimizer.step = step
        try:
            self.train(shards)
        finally:
            optimizer.step = take_step
        return first, seen

    def move_adapters(self):
        """Give both factors of every adapter random values that do not depend on the layout."""
        import zlib

        import torch

        from slime_convert.mapping import WeightMap
        from slime_megatron.model.lora import FACTORS, adapted_layers

        trainer = self.worker
        weight_map = WeightMap(trainer.shape)
        with torch.no_grad():
            for name, _, layer in adapted_layers(trainer.model):
                rank = layer.lora_A.shape[0]
                outputs, inputs = weight_map.megatron_shape(name)
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                for factor, whole in zip(
                    FACTORS,
                    (torch.randn(rank, inputs, generator=generator), torch.randn(outputs, rank, generator=generator)),
                    strict=True,
                ):
                    whole = whole * 0.1
                    if factor == layer.split_factor and layer.tp_group.size() > 1:
                        whole = weight_map.split_tp(name, whole, layer.tp_group.size())[layer.tp_group.rank()]
                    getattr(layer, factor).copy_(whole)
        trainer._roles.actor.optimizer.reload_model_params()

    def trainable_numbers(self):
        """Numbers that train on this rank, and all."""
        params = [param for chunk in self.worker.model for param in chunk.parameters()]
        return sum(param.numel() for param in params if param.requires_grad), sum(param.numel() for param in params)

    def optimizer_numbers(self):
        """Numbers of Adam's state that this rank keeps, without the counts of steps."""
        states = [
            state
            for part in self.worker._roles.actor.optimizer.chained_optimizers
            for state in part.optimizer.state.values()
        ]
        return sum(value.numel() for state in states for name, value in state.items() if name != "step")

    def has_optimizer(self):
        return "_optimizer" in vars(self.worker._roles.actor)

    def held_bytes(self, role="actor"):
        """Bytes of a role's weights, gradient buffers and optimizer on this rank."""
        model = {"actor": self.worker._roles.actor, "critic": self.worker._roles.critic}[role]

        def size(tensors):
            storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
            return sum(storages.values())

        if any(param.requires_grad for chunk in model.model for param in chunk.parameters()):
            _ = model.optimizer  # it is built when it is asked for
        return size(model.weights()), size(model.gradients()), size(model.optimizer_state())

    def stock_logits(self, *args, **kwargs):
        from stock_model import stock_logits

        return stock_logits(*args, **kwargs)

    def random_numbers(self):
        """One from each random state."""
        import random

        import numpy as np
        import torch

        return random.random(), np.random.random(), torch.rand(()).item()

    def children(self):
        """Processes that this one has started."""
        return [
            child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()
        ]

    def threads(self):
        import torch

        return torch.get_num_threads()


def hidden(chunk, batch):
    """The hidden states that predict the targets."""
    from slime_megatron.model.build import run

    return run(chunk, batch)[0].index_select(0, batch.logit_rows_M)


def packed(samples, share_prompts, multiple_of):
    """The samples as a trainer gets them, in one micro-batch."""
    import numpy as np

    from slime_core.types import TrainShard
    from slime_megatron.model.packing import MicroBatch

    samples = [dataclasses.replace(sample, loss_mask=np.array(sample.loss_mask, np.uint8)) for sample in samples]
    samples = TrainShard.of(rollout_id=0, temperature=1.0, samples=samples, steps=[]).samples
    return MicroBatch(samples, share_prompts=share_prompts, multiple_of=multiple_of).pack()


def _plain(tensors):
    """Tensors as arrays; bfloat16, which NumPy does not know, as float32."""
    return {name: tensor.detach().float().numpy().copy() for name, tensor in tensors.items()}


def _status(field):
    """A number of bytes from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def serve(connection):
    """Answer commands until the pipe is closed."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    rank = Rank()
    while True:
        try:
            name, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            answer = ("ok", getattr(rank, name)(*args, **kwargs))
            pickle.dumps(answer)
        except Exception as error:
            traceback.print_exc()
            answer = ("error", type(error).__name__, str(error))
        connection.send(answer)
