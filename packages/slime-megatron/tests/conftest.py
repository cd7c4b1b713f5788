"""Fixtures: trainer ranks in processes that are reused, tiny models, samples."""

import contextlib
import dataclasses
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_convert.published import PUBLISHED
from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_core.types import Rendezvous, TrainSample, TrainShard, TrainStep
from slime_megatron.settings.config import MegatronConfig

TIME_LIMIT = 120
MOST_THREADS = 150


class RankError(Exception):
    """What a rank raised; ``kind`` is the type's name."""

    def __init__(self, kind, text):
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


class Forked:
    """A process that another one forked, with what is used here of subprocess.Popen."""

    def __init__(self, pid):
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def wait(self, seconds=None):
        if not select.select([self._descriptor], [], [], seconds)[0]:
            raise subprocess.TimeoutExpired(f"rank {self.pid}", seconds)

    def send_signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class Template:
    """The process that ranks are forked from, so that they need not import torch and Megatron one by one."""

    def __init__(self):
        self._requests, theirs = socket.socketpair()
        tests = Path(__file__).parent
        program, places = tests / "support" / "rank_template.py", [str(tests), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(program), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            # Functions of tests that ranks call import from `support`, too.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, places))},
        )
        theirs.close()

    def fork(self, pipe):
        socket.send_fds(self._requests, [b"x"], [pipe.fileno()])
        answer = self._requests.recv(4, socket.MSG_WAITALL)
        if len(answer) < 4:
            raise RuntimeError("the process that forks ranks ended")
        return Forked(struct.unpack("i", answer)[0])

    def stop(self):
        self._requests.close()
        self._process.kill()  # it holds nothing
        self._process.wait()


TEMPLATES = {}
"""With and without the stand-ins for Transformer Engine, which must be there before Megatron is imported."""


def pytest_sessionfinish():
    for template in TEMPLATES.values():
        template.stop()


class RankProcess:
    def __init__(self):
        kind = os.environ.get("TE_STAND_IN")
        if kind not in TEMPLATES:
            TEMPLATES[kind] = Template()
        self.connection, theirs = Pipe()
        self.process = TEMPLATES[kind].fork(theirs)
        theirs.close()

    def stop(self):
        self.connection.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Ranks:
    """A group of ranks with a worker each. Whoever takes more than ``seconds`` to answer is taken to hang."""

    def __init__(self, pool):
        self._pool = pool
        self._folder = tempfile.TemporaryDirectory()
        self._members = []
        self.seconds = TIME_LIMIT

    def start(self, world, config, shape, algorithm=None, *, address=None, **how):
        """Build workers on ``world`` ranks and return them as a group; the last group is closed.

        They meet in a file, or at a port of ``address``.
        """
        self.close()
        self._recruit(world)
        self.port = 0 if address is None else free_port()
        algorithm = algorithm or AlgorithmConfig()
        where = {"file": self._file()} if address is None else {"address": address, "port": self.port}
        for rank, member in enumerate(self._members):
            rendezvous = Rendezvous(rank=rank, world_size=world, **where)
            member.connection.send(("build", (config, algorithm, shape, rendezvous), how))
        self.iteration = self._answers()[0]
        return self

    def call_apart(self, world, name, *args, **kwargs):
        """Call a command that needs no worker on ``world`` ranks, each with its rendezvous; a list of answers."""
        self.close()
        self._recruit(world)
        file = self._file()
        for rank, member in enumerate(self._members):
            rendezvous = Rendezvous(rank=rank, world_size=world, file=file)
            member.connection.send((name, (*args, rendezvous), kwargs))
        return self._answers()

    def call(self, name, *args, **kwargs):
        """Call a command on every rank; a list of answers."""
        for member in self._members:
            member.connection.send((name, args, kwargs))
        return self._answers()

    def processes(self):
        """Process ids of its ranks."""
        return [member.process.pid for member in self._members]

    def _file(self):
        return str(Path(self._folder.name) / uuid.uuid4().hex)

    def first(self, name, *args, **kwargs):
        """The same, but only rank 0's answer."""
        return self.call(name, *args, **kwargs)[0]

    def _recruit(self, world):
        while len(self._pool) < world:
            self._pool.append(RankProcess())
        self._members = self._pool[:world]

    def close(self):
        if self._members:
            self.call("close")
            for member in self._members:
                # Process groups that something still holds have threads, which take time from those that follow.
                if sum(1 for _ in Path(f"/proc/{member.process.pid}/task").iterdir()) > MOST_THREADS:
                    member.stop()
                    self._pool.remove(member)
            self._members = []

    def _answers(self):
        answers = []
        for member in self._members:
            if not member.connection.poll(self.seconds):
                self._abandon()
                raise TimeoutError(f"a rank did not answer within {self.seconds} s")
            try:
                answers.append(member.connection.recv())
            except EOFError as error:
                self._abandon()
                raise RuntimeError("a rank died") from error
        errors = [answer for answer in answers if answer[0] == "error"]
        if errors:
            self._leave()
            raise RankError(*errors[0][1:])
        return [answer[1] for answer in answers]

    def _leave(self):
        """After an error all have answered, so nobody hangs in a collective: they can be used again."""
        for member in self._members:
            member.connection.send(("leave", (), {}))
        if not all(
            member.connection.poll(TIME_LIMIT) and member.connection.recv()[0] == "ok" for member in self._members
        ):
            self._abandon()
        self._members = []

    def _abandon(self):
        """A group in which something failed may hang in a collective: start afresh."""
        for member in self._members:
            member.process.kill()
            member.stop()
            self._pool.remove(member)
        self._members = []


def free_port():
    """One below those of outgoing connections (32768 on Linux), which might take it before a rank does."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@pytest.fixture(scope="session")
def rank_pool():
    pool = []
    yield pool
    for member in pool:
        member.stop()


@pytest.fixture
def ranks(rank_pool):
    group = Ranks(rank_pool)
    yield group
    group.close()


@pytest.fixture(scope="session")
def rank_group():
    return Ranks


@pytest.fixture
def rank_error():
    return RankError


@pytest.fixture(scope="session")
def tiny_config():
    """Builds settings for tiny models: large steps, so that a wrong gradient shows."""

    def build(**values):
        return MegatronConfig(**{"lr": 1e-2, "weight_decay": 0.1, "trainer_threads": 1, **values})

    return build


@pytest.fixture(scope="session")
def make_samples():
    def build(groups=4, per_group=4, prompt=9, response=5, vocab=500, seed=0, masks=False, common=0):
        """Groups with prompts and responses of different lengths; rewards with zero mean in each group.

        All prompts have ``common`` first tokens in common, besides the ``prompt`` or more of each.
        """
        rng = random.Random(seed)
        samples, beginning = [], [rng.randrange(vocab) for _ in range(common)]
        for group in range(groups):
            prompt_tokens = beginning + [rng.randrange(vocab) for _ in range(prompt + group)]
            for member in range(per_group):
                length = response + rng.randrange(3)
                mask = [int(not masks or rng.random() < 0.7) for _ in range(length)]
                samples.append(
                    TrainSample(
                        index=len(samples) + 100,
                        group_index=group,
                        tokens=prompt_tokens + [rng.randrange(vocab) for _ in range(length)],
                        response_length=length,
                        loss_mask=mask,
                        trajectory_tokens=sum(mask),
                        reward=(member - (per_group - 1) / 2) * 0.7,
                        raw_reward=float(member),
                        rollout_log_probs=[-rng.random() * 3 for _ in range(length)],
                    )
                )
        return samples

    return build


@pytest.fixture(scope="session")
def make_shards():
    def build(samples, *, data_parallel=1, micro_batch_size=None, steps=1, temperature=1.0, rollout_id=0, together=1):
        """Samples dealt to ranks in turns, so many at a time, in steps of equal size."""
        size = len(samples) // steps
        shards = []
        for rank in range(data_parallel):
            own, train_steps = [], []
            for number in range(steps):
                members = samples[number * size : (number + 1) * size]
                positions = []
                for place, sample in enumerate(members):
                    if place // together % data_parallel != rank:
                        continue
                    positions.append(len(own))
                    own.append(dataclasses.replace(sample, loss_mask=np.array(sample.loss_mask, np.uint8)))
                micro = micro_batch_size or len(positions)
                train_steps.append(
                    TrainStep(
                        micro_batches=[positions[i : i + micro] for i in range(0, len(positions), micro)],
                        global_trajectories=size,
                        global_tokens=sum(sum(sample.loss_mask) for sample in members),
                    )
                )
            shards.append(TrainShard.of(rollout_id=rollout_id, temperature=temperature, samples=own, steps=train_steps))
        return shards

    return build


@dataclass
class TinyModel:
    """A random transformers model and the same weights as a converted checkpoint."""

    hf: Any
    hf_directory: str
    shape: ModelShape
    checkpoint: str


SIZES = {
    "vocab_size": 500,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "head_dim": 16,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}


def add_prediction_module(directory, layers):
    """Give a saved model the module that predicts a further token, which transformers leaves out.

    Its layer is like the model's last; the other names are those of the published checkpoints.
    """
    path = directory / "model.safetensors"
    weights = load_file(path)
    last, further = (f"model.layers.{layers + offset}." for offset in (-1, 0))
    hidden = SIZES["hidden_size"]
    own = {name.replace(last, further): torch.randn_like(t) for name, t in weights.items() if name.startswith(last)}
    own |= {further + name: torch.randn(hidden) for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    own[further + "eh_proj.weight"] = torch.randn(hidden, 2 * hidden)
    own[further + "embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    own[further + "shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights | own, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "num_mtp_layers": 0,
    "tie_word_embeddings": False,
}
LATENT = {
    **{key: value for key, value in SIZES.items() if key not in ("head_dim", "num_key_value_heads")},
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# Kimi-K2's published config, scaled down: 24 of its 384 experts, and smaller matrices. Nothing else is changed.
KIMI = {
    **PUBLISHED["kimi-k2"].config,
    **{key: value for key, value in LATENT.items() if key != "max_position_embeddings"},
    "q_lora_rank": 24,
    "n_routed_experts": 24,
    "moe_intermediate_size": 32,
}


def kimi_config():
    """Kimi-K2 as transformers sees it, which has no class of that name: the model's own code is DeepSeek V3's."""
    from transformers import DeepseekV3Config

    return DeepseekV3Config(**{key: value for key, value in KIMI.items() if key != "model_type"})


GLM = {"tie_word_embeddings": False, "attention_bias": True, "pad_token_id": 0, "rms_norm_eps": 1e-5}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Builds each of ``configs`` once: among them are untied models, scaled and partial rotary embeddings, biases.

    A name with ``/4`` has four layers.
    """
    from slime_convert import hf_to_torch_dist

    torch.set_num_threads(1)
    made = {}

    def build(name):
        if name in made:
            return made[name]
        from transformers import (
            AutoModelForCausalLM,
            DeepseekV3Config,
            Glm4Config,
            Glm4MoeConfig,
            Glm4MoeLiteConfig,
            GlmConfig,
            LlamaConfig,
            Qwen2Config,
            Qwen3Config,
            Qwen3MoeConfig,
        )

        family, _, layers = name.partition("/")
        count = {"num_hidden_layers": int(layers or SIZES["num_hidden_layers"])}
        sizes, latent = SIZES | count, LATENT | count
        configs = {
            "llama-tied": lambda: LlamaConfig(**sizes, tie_word_embeddings=True),
            "llama3-rope": lambda: LlamaConfig(**sizes, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
            "qwen2-tied": lambda: Qwen2Config(**sizes, tie_word_embeddings=True),
            "qwen3": lambda: Qwen3Config(**sizes, tie_word_embeddings=False),
            "qwen3-moe": lambda: Qwen3MoeConfig(**sizes, **EXPERTS, tie_word_embeddings=False),
            "glm4-moe": lambda: Glm4MoeConfig(**sizes, **ROUTED, use_qk_norm=True, attention_bias=True, pad_token_id=0),
            "glm4-air": lambda: Glm4MoeConfig(**sizes, **ROUTED, attention_bias=True, pad_token_id=0),
            "deepseek": lambda: DeepseekV3Config(
                **latent, **ROUTED, q_lora_rank=24, n_group=2, topk_group=1, rope_parameters=YARN
            ),
            "deepseek-mtp": lambda: configs["deepseek"](),
            "glm4-moe-mtp": lambda: configs["glm4-moe"](),
            "moonlight": lambda: DeepseekV3Config(**latent, **ROUTED, q_lora_rank=None, n_group=1, topk_group=1),
            "kimi-k2": kimi_config,
            "glm4-flash": lambda: Glm4MoeLiteConfig(**latent, **ROUTED, q_lora_rank=24),
            "glm": lambda: GlmConfig(**sizes, **GLM),
            "glm4": lambda: Glm4Config(**sizes, **GLM),
        }
        torch.manual_seed(7)
        hf = AutoModelForCausalLM.from_config(configs[family](), dtype=torch.float32).eval()
        with torch.no_grad():
            for param in hf.parameters():
                # Weights large enough that logits, and what is wrong with them, are far from zero.
                param.normal_(0, 0.15) if param.dim() > 1 else param.add_(0.1 * torch.randn_like(param))
            for key, buffer in hf.named_buffers():
                if key.endswith("e_score_correction_bias"):
                    buffer.normal_(0, 0.2)
        directory = tmp_path_factory.mktemp(name.replace("/", "-"))
        hf.save_pretrained(directory / "hf")
        if family.endswith("-mtp"):
            add_prediction_module(directory / "hf", count["num_hidden_layers"])
        if family == "kimi-k2":
            (directory / "hf" / "config.json").write_text(json.dumps(KIMI))
        # Files of a few weights each, as a large model has them.
        hf_to_torch_dist(directory / "hf", directory / "torch_dist", part_bytes=20_000)
        shape = ModelShape.from_hf_config(directory / "hf")
        made[name] = TinyModel(hf, str(directory / "hf"), shape, str(directory / "torch_dist"))
        return made[name]

    return build


@pytest.fixture(scope="session")
def hf_logits():
    """transformers' logits of the positions that predict response tokens, one sample after the other."""

    def compute(hf, samples):
        rows = []
        for sample in samples:
            logits = hf(torch.tensor([sample.tokens])).logits[0]
            rows.append(logits[sample.prompt_length - 1 : len(sample.tokens) - 1])
        return torch.cat(rows)

    return compute
