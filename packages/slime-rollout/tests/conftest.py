"""A small trained tokenizer and model, prompt files, the engines' interpreter, and a scripted HTTP server."""

import asyncio
import contextlib
import functools
import json
import os
import threading
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slime_rollout.config import RolloutConfig
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.server import EngineSpec
from slime_rollout.engine.template import imported_sglang
from slime_rollout.generation_service import GenerationService
from slime_rollout.rollout import RolloutManager
from slime_rollout.serving_engines import GenerationSpec


def pytest_collection_modifyitems(items):
    """Tests that end the engines which others share come last."""
    items.sort(key=lambda item: item.path.name == "test_real_fleet.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With several processes (pytest-xdist), tests with real engines run in one of them, in order: they share them.

    `--dist=loadgroup` would be for that, but pytest-xdist 3.8 does not group with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class RealTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return "real" if "/test_real" in nodeid else nodeid

    return RealTogether(config, log)


TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    """A byte-level BPE tokenizer with a chat template."""
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_bpe(), eos_token="<|end|>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(directory)
    return str(directory)


@functools.cache
def byte_level_bpe():
    """The tokenizer of what the scripted engine says."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["12 + 30 = 42", "say a number: 3"] * 5, trainer)
    return bpe


def said(text):
    """The tokens of a text, and an end: two or more."""
    return (*byte_level_bpe().encode(text).ids, 0)


@pytest.fixture(scope="session")
def tiny_model(tokenizer_dir, tmp_path_factory):
    """A tiny random Qwen3 in fp32, with a tokenizer that was really trained.

    Its generation_config.json asks for sampling that is far from plain: nothing may follow it.
    """
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("tiny")
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(directory)
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=8192,
        eos_token_id=0,
        tie_word_embeddings=False,
        dtype="float32",
    )
    network = Qwen3ForCausalLM(shape)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
    network.save_pretrained(directory)
    wishes = {"do_sample": True, "temperature": 0.3, "top_k": 5, "top_p": 0.5, "repetition_penalty": 1.5}
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, **wishes}))
    return str(directory)


def find_engine_python(given, usual):
    """The interpreter that has SGLang: the one that was named, which then must be there, or else the usual one."""
    if given:
        if not os.access(given, os.X_OK):
            pytest.fail(f"SLIME_ENGINE_PYTHON names {given}, which is no program; build it or unset it", pytrace=False)
        return given
    if not usual.exists():
        pytest.skip(f"no engine interpreter at {usual}; name one that has SGLang in SLIME_ENGINE_PYTHON")
    return str(usual)


@pytest.fixture(scope="session")
def engine_python():
    return find_engine_python(
        os.environ.get("SLIME_ENGINE_PYTHON"), Path(__file__).parents[3] / ".venv-engine/bin/python"
    )


@pytest.fixture(scope="session")
def engine_config(engine_python, tiny_model):
    """Engines that are forked from a process that has imported SGLang, as those of a run are."""
    config = EngineConfig(sglang_python=engine_python, engine_threads=1)
    with imported_sglang(config, EngineSpec(model_path=tiny_model)) as forking:
        yield forking


@pytest.fixture
def write_rows(tmp_path):
    """Write rows as a JSONL file and return its path."""

    def write(rows, name="prompts.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


def good_reply(text=None, tokens=None, version="default", finish=None, **meta):
    """What SGLang answers to /generate: a text with its tokens, unless others are given."""
    tokens = tokens if tokens is not None else (5, 6) if text is None else said(text)
    text = "42" if text is None else text
    return {
        "text": text,
        "output_ids": list(tokens),
        "meta_info": {
            "finish_reason": finish or {"type": "stop", "matched": 0},
            "weight_version": version,
            "completion_tokens": len(tokens),
            "output_token_logprobs": [[-0.5 - place, token, None] for place, token in enumerate(tokens)],
            **meta,
        },
    }


class ScriptedEngine:
    """Answers each POST /generate by calling ``answer(number, body)``: a reply, an HTTP status, or a coroutine.

    Also keeps what POST /abort_request was told, and answers GET /workers as a router does once there are any, any
    other GET from ``pages``, and any other POST by ``on_post(path)``. ``posted`` has those, with tags of memory.
    """

    def __init__(self):
        self.bodies, self.headers = [], []
        self.aborts, self.abort_status, self.abort_delay = [], 200, 0.0
        self.on_abort: Callable = lambda told: None
        self.aborting = self.most_aborts = 0
        self.workers, self.workers_body, self.times_asked = None, None, 0
        self.in_flight = self.most_in_flight = 0
        self.answer: Callable = lambda number, body: good_reply()
        self.pages, self.posted = {}, []
        self.on_post: Callable = lambda path: web.Response(status=404)
        self.url = ""

    async def _handle(self, request):
        number, body = len(self.bodies), await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            answer = self.answer(number, body)
            answer = await answer if asyncio.iscoroutine(answer) else answer
        finally:
            self.in_flight -= 1
        if answer is None:
            request.transport.close()
            return web.Response()
        if isinstance(answer, web.StreamResponse):
            return answer
        if isinstance(answer, int):
            return web.Response(status=answer, text=f"scripted {answer}")
        if isinstance(answer, str):
            return web.Response(text=answer)
        if isinstance(answer, web.Response):
            return answer
        return web.json_response(answer)

    async def _abort(self, request):
        self.aborting += 1
        self.most_aborts = max(self.most_aborts, self.aborting)
        try:
            told = await request.json()
            await asyncio.sleep(self.abort_delay)
        finally:
            self.aborting -= 1
        self.aborts.append(told)
        self.on_abort(told)
        return web.Response(status=self.abort_status)

    async def _workers(self, request):
        self.times_asked += 1
        if self.workers_body is not None:
            return web.json_response(self.workers_body)
        if self.workers is None:
            return web.Response(status=404)
        return web.json_response({"workers": [{"url": url} for url in self.workers]})

    async def _post(self, request):
        text = await request.text()
        self.posted.append((request.path, *((json.loads(text).get("tags") or ()) if text else ())))
        return self.on_post(request.path)

    async def _page(self, request):
        page = self.pages.get(request.path)
        return web.Response(status=404) if page is None else web.json_response(page)

    def run(self, ready, stop):
        async def serve():
            app = web.Application()
            app.router.add_post("/generate", self._handle)
            app.router.add_post("/abort_request", self._abort)
            app.router.add_post("/{page}", self._post)
            app.router.add_get("/workers", self._workers)
            app.router.add_get("/{page}", self._page)
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.01)
            await runner.cleanup()

        asyncio.run(serve())


@contextlib.contextmanager
def scripted_engine():
    scripted, ready, stop = ScriptedEngine(), threading.Event(), threading.Event()
    thread = threading.Thread(target=scripted.run, args=(ready, stop), daemon=True)
    thread.start()
    assert ready.wait(20)
    yield scripted
    stop.set()
    thread.join(20)


@pytest.fixture
def engine():
    """A server for failures that a real engine does not show on demand."""
    with scripted_engine() as engine:
        yield engine


@pytest.fixture
def other_engine():
    """Another one."""
    with scripted_engine() as engine:
        yield engine


@pytest.fixture
def reply():
    """Builds SGLang's answer to /generate."""
    return good_reply


@pytest.fixture
def manager(engine, tokenizer_dir, write_rows):
    """Builds a manager of six prompts before the scripted engine."""
    path = write_rows([{"prompt": f"say a number: {number}", "label": str(number)} for number in range(6)])
    built = []

    def build(*, on_progress=None, key=None, turns=None, **changes):
        config = {
            "hf_checkpoint": tokenizer_dir,
            "prompt_data": path,
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 3,
            "rm_type": "first_integer",
            **changes,
        }
        built.append(
            RolloutManager(
                RolloutConfig.of(**config),
                router_url=engine.url,
                run_seed=5,
                on_progress=on_progress,
                key=key,
                turns=turns,
            )
        )
        return built[-1]

    yield build
    for manager in built:
        manager.close()


@pytest.fixture
def service(manager, engine):
    """A service whose engine is the scripted one."""
    given = manager()
    spec = GenerationSpec(
        engine=EngineConfig(), rollout=given._config, num_engines=1, num_gpus=1, topology=None, dtype="float32",
        context_length=None, seed=5, log_dir="", flags={},
    )  # fmt: skip
    service = GenerationService(spec)
    updates = []
    service.engines.generator = given
    service.engines._fleet = types.SimpleNamespace(
        engine_urls=[engine.url], tp_size=1, updates=updates, check=lambda: None, stop=lambda: updates.append("stop"),
        begin_update=lambda only_behind: [] if only_behind else [engine.url], confirm_update=updates.append,
        begin_sleep=lambda: updates.append("begin_sleep"), replace=lambda urls: updates.append(("replace", urls)),
        end_sleep=lambda awake: updates.append(("end_sleep", awake)),
    )  # fmt: skip
    return service
