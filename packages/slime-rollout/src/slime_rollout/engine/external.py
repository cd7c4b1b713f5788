"""External engines: asked what they are, checked against the run, and left running at its end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from slime_core.errors import DataError
from slime_core.files import read_json
from slime_rollout.engine import EngineDiedError, ExternalEngineError
from slime_rollout.engine.addresses import Ports
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.fleet import Fleet, Progress
from slime_rollout.engine.server import EngineSpec, answers, wait_for
from slime_rollout.engine.slots import RouterSlot
from slime_rollout.http import INCOMPLETE, HttpError, call, excerpt

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_SECONDS = 30.0
RELEASE_TIMEOUT_SECONDS = 5.0
CHECK_SECONDS = 5.0
WARN_AFTER_SECONDS = 10.0
MOST_THREADS = 32
HEALTH_PATH = "/health"
# Paused for new weights, an engine that was started without our environment answers `/health` no more.
PAUSED_HEALTH_PATH = "/model_info"
# What SGLang makes of `--dtype auto`, by the type in the model's config.
AUTO_DTYPES = {"float32": "float16", "float16": "float16", "bfloat16": "bfloat16"}

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExternalEngine:
    """An engine, as it reports itself."""

    url: str
    model_path: str  # as its machine names it
    dtype: str  # `float32`, `bfloat16` …, or `auto`
    context_length: int | None
    tp_size: int
    other_sizes: dict[str, int]  # pipeline and data parallel sizes and nodes that are not 1, by SGLang's flag
    weight_version: str
    deterministic: bool  # whether samples follow their seeds
    returns_experts: bool  # whether it can say which experts it chose
    generates: bool  # whether it is a whole engine for text: no embedding, prefill, decode or encoder engine

    @classmethod
    def probe(cls, url: str, key: str | None = None) -> ExternalEngine:
        """Ask a running engine; `ExternalEngineError` if it does not answer, or not like an SGLang engine."""
        server, model = _page(url, "/server_info", _Server, key), _page(url, "/model_info", _Model, key)
        sizes = {"pp-size": server.pp_size, "dp-size": server.dp_size, "nnodes": server.nnodes}
        return cls(
            url=url,
            model_path=server.model_path,
            dtype=server.dtype,
            context_length=server.context_length,
            tp_size=server.tp_size,
            other_sizes={name: size for name, size in sizes.items() if size != 1},
            weight_version=model.weight_version,
            deterministic=server.enable_deterministic_inference,
            returns_experts=server.enable_return_routed_experts,
            generates=model.is_generation and server.disaggregation_mode == "null" and not server.encoder_only,
        )


_Size = Annotated[int, msgspec.Meta(ge=1)]


class _Server(msgspec.Struct):
    """The fields of `/server_info` that count here."""

    model_path: str
    dtype: str
    context_length: _Size | None
    tp_size: _Size
    pp_size: _Size
    dp_size: _Size
    nnodes: _Size
    enable_deterministic_inference: bool
    enable_return_routed_experts: bool
    disaggregation_mode: str
    encoder_only: bool


class _Model(msgspec.Struct):
    """Those of `/model_info`."""

    weight_version: str
    is_generation: bool


def _page(url: str, path: str, kind: type[T], key: str | None) -> T:
    try:
        return msgspec.convert(call("GET", url + path, key=key, timeout=PROBE_TIMEOUT_SECONDS), kind)
    except HttpError as error:
        raise ExternalEngineError(f"the engine {url} does not report what it is: {error}") from error
    except msgspec.ValidationError as error:
        raise ExternalEngineError(
            f"{url}{path} answers, but not like an SGLang engine ({excerpt(str(error))}); slime was tested with "
            "SGLang 0.5.23"
        ) from error


def mismatches(engines: Sequence[ExternalEngine], wanted: EngineSpec, *, weights_follow: bool) -> list[str]:
    """One line for each property of an engine that does not fit the run.

    If the tensor parallel size of ``wanted`` is ``None``, any fits that all engines share. Its context length is the
    longest prompt plus response that must fit; not checked if ``None``. All engines must have the same weights, unless
    new ones are sent before the first request (``weights_follow``).
    """
    first = engines[0]
    whose = "--rollout-num-gpus-per-engine is" if wanted.tp_size else f"{first.url} has"
    path, dtype, longest = wanted.model_path, wanted.dtype, wanted.context_length or 0
    found = []
    for engine in engines:
        problems = []
        if not same_model(engine.model_path, path):
            problems.append(f"serves {engine.model_path}, and --hf-checkpoint is {path}: start it with that model")
        elif (computes := _plain_dtype(engine)) != dtype:
            problems.append(f"computes in {computes}, and the run in {dtype}: start it with --dtype {dtype}")
        if engine.context_length is not None and engine.context_length < longest:
            problems.append(
                f"takes {engine.context_length} tokens, and prompt and response may have {longest}: start it "
                "with a larger --context-length, or shorten --rollout-max-response-len"
            )
        if engine.tp_size != (expected := wanted.tp_size or first.tp_size):
            problems.append(f"has tensor parallel size {engine.tp_size}, and {whose} {expected}: make them the same")
        for name, size in engine.other_sizes.items():
            problems.append(
                f"runs with --{name} {size}: weights reach engines with tensor parallelism on one node only"
            )
        if wanted.seeded and not engine.deterministic:
            problems.append("samples independently of the seeds: start it with --enable-deterministic-inference")
        if engine.deterministic and not wanted.seeded:
            problems.append("ends at --rollout-min-p: start it without --enable-deterministic-inference")
        if wanted.returns_experts and not engine.returns_experts:
            problems.append(
                "does not say which experts it chose, for --use-rollout-routing-replay: start it with "
                "--enable-return-routed-experts"
            )
        if not engine.generates:
            problems.append("does not generate by itself: it is a prefill, decode, encoder or embedding engine")
        if not weights_follow and engine.weight_version == INCOMPLETE:
            problems.append(
                "has parts of some weights only, because an update failed: start it again, or send it weights"
            )
        elif not weights_follow and engine.weight_version != first.weight_version:
            problems.append(f"has weight version {engine.weight_version}, and {first.url} has {first.weight_version}")
        found += [f"{engine.url} {problem}" for problem in problems]
    return found


def same_model(theirs: str, ours: str) -> bool:
    """Whether two paths name one model. If the engine's path does not exist here, the last parts are compared."""
    their_config, our_config = _config(theirs), _config(ours)
    if their_config is not None and our_config is not None:
        return their_config == our_config
    return Path(theirs).name == Path(ours).name


def _config(path: str) -> dict[str, Any] | None:
    """A model's config without what does not describe the model; ``None`` if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, AttributeError, DataError):
        config = read_json(Path(path) / "config.json")
        return {name: value for name, value in config.items() if name not in ("transformers_version", "_name_or_path")}
    return None


def _plain_dtype(engine: ExternalEngine) -> str:
    """The engine's dtype, also for ``auto`` and ``half``; ``auto`` if the model's config cannot be read here."""
    if engine.dtype != "auto":
        return {"half": "float16", "float": "float32"}.get(engine.dtype, engine.dtype)
    config = _config(engine.model_path) or {}
    return AUTO_DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), "auto")


class ExternalFleet(Fleet):
    """External engines behind a router. Made by :meth:`attach`; nothing of it is ever replaced."""

    def __init__(self, engines: Sequence[ExternalEngine], router: RouterSlot, key: str | None) -> None:
        self.engines = tuple(engines)
        self._router, self._key = router, key
        self.tp_size = engines[0].tp_size
        self._next_check = 0.0
        self._attached = True

    @classmethod
    def attach(
        cls,
        config: EngineConfig,
        wanted: EngineSpec,
        *,
        log_dir: Path,
        weights_follow: bool = False,
        on_progress: Progress | None = None,
    ) -> ExternalFleet:
        """Find the engines of ``rollout_external_engine_addrs``; return when a router sends them requests.

        ``wanted`` and ``weights_follow`` are as of :func:`mismatches`, but the tensor parallel size is the config's.

        Raises:
            EngineStartError: An engine or the router does not answer within ``engine_startup_timeout``.
            ExternalEngineError: An engine does not fit the run; one line for each thing that does not.
            PortInUseError: The router's port is taken.
        """
        started = time.monotonic()
        urls, timeout = config.external_urls, config.engine_startup_timeout
        wait_for_answers(urls, timeout, on_progress, key=config.key)
        engines = _on_all(urls, lambda url: ExternalEngine.probe(url, config.key))
        tp_size = config.rollout_num_gpus_per_engine if config.rollout_num_gpus_per_engine > 1 else None
        wanted = dataclasses.replace(wanted, tp_size=tp_size)
        if problems := mismatches(engines, wanted, weights_follow=weights_follow):
            raise ExternalEngineError(
                "engines of --rollout-external-engine-addrs do not fit this run:\n  " + "\n  ".join(problems)
            )
        log_dir.mkdir(parents=True, exist_ok=True)
        ports = Ports(config.sglang_router_port, *(int(url.rsplit(":", 1)[1]) for url in urls))
        router = RouterSlot(config, ports, log_path=log_dir / "router.log", engine_urls=urls)
        try:
            router.start()
            left = timeout - (time.monotonic() - started)
            wait_for(router.is_ready, left, lambda: f"{router.url} does not answer; see {router.process.log_excerpt()}")
            router.process.add_workers(urls)
        except BaseException:
            router.stop()
            raise
        return cls(engines, router, config.key)

    @property
    def engine_urls(self) -> list[str]:
        """All engines."""
        return [engine.url for engine in self.engines]

    def check(self) -> None:
        """Raise `EngineDiedError` if the router has ended, or does not use an engine that does not answer either."""
        self._router.process.check()
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_SECONDS
        try:
            used = {url for url, (_, healthy) in self._router.process.workers().items() if healthy}
        except HttpError:
            return  # the router's own `check` reports what is wrong with it
        unused = [url for url in self.engine_urls if url not in used]
        path = PAUSED_HEALTH_PATH if self._updating else HEALTH_PATH
        are_up = _on_all(unused, lambda url: answers(url + path, key=self._key))
        if silent := [url for url, is_up in zip(unused, are_up, strict=True) if not is_up]:
            raise EngineDiedError(f"the external engine {silent[0]} does not answer; start it again")

    def stop(self) -> None:
        """End our router, or unregister the engines from an external one, and leave the engines generating.

        An interrupted weight update is closed; their weight version is then ``incomplete``.
        """
        if not self._attached:
            return
        self._attached = False
        self._router.request_stop()
        _on_all(self.engine_urls, lambda url: release(url, self._key))
        self._router.stop()


def wait_for_answers(
    urls: Sequence[str], timeout: float, on_progress: Progress | None = None, *, key: str | None = None
) -> None:
    """Return when all engines answer; `EngineStartError` if one does not within ``timeout`` seconds."""
    started = time.monotonic()
    waiting, warned = list(urls), False

    def ask(url: str, seconds: float) -> bool:
        # The update of a killed run may still be open; the next one closes it. Closing it here would wait for all
        # requests of an engine that is not paused. Its weight version is `incomplete` if weights have changed.
        with contextlib.suppress(HttpError):
            call("POST", f"{url}/continue_generation", {}, key=key, timeout=RELEASE_TIMEOUT_SECONDS)
        return answers(url + HEALTH_PATH, seconds)

    def all_answer(seconds: float) -> bool:
        nonlocal waiting, warned
        answered = _on_all(waiting, lambda url: ask(url, seconds))
        waiting = [url for url, is_up in zip(waiting, answered, strict=True) if not is_up]
        passed = time.monotonic() - started
        if on_progress is not None:
            on_progress(len(urls) - len(waiting), len(urls), passed)
        if waiting and passed > WARN_AFTER_SECONDS and not warned:
            logger.warning("still waiting for external engines: %s", ", ".join(waiting))
            warned = True
        return not waiting

    hint = f"does not answer after {timeout:g} s; start it, or raise --engine-startup-timeout"
    wait_for(all_answer, timeout, lambda: f"the engine {waiting[0]} of --rollout-external-engine-addrs {hint}")


def release(url: str, key: str | None = None) -> None:
    """Resume an engine that an interrupted weight update has paused."""
    post = functools.partial(call, "POST", key=key, timeout=RELEASE_TIMEOUT_SECONDS)
    with contextlib.suppress(HttpError):
        post(f"{url}/end_weight_update", {})  # refused where none is open
        post(f"{url}/update_weight_version", {"new_version": INCOMPLETE, "abort_all_requests": False})
    with contextlib.suppress(HttpError):
        post(f"{url}/continue_generation", {})


def _on_all(urls: Sequence[str], action: Callable[[str], T]) -> list[T]:
    """Call ``action`` for all engines at once; the results in their order."""
    if not urls:
        return []
    with ThreadPoolExecutor(min(len(urls), MOST_THREADS)) as pool:
        return list(pool.map(action, urls))
