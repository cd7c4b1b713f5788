"""New weights for running engines.

The trainer's rank 0 calls ``begin``, ``send`` for each bucket, ``end``. Nothing of SGLang is imported: a bucket is
copied into shared memory, and the engines are told, over HTTP, where it is.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import dataclasses
import io
import logging
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing

from slime_core.interfaces import NamedTensors
from slime_rollout.engine.errors import WeightSyncError
from slime_rollout.http import HttpError, call

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_SECONDS = 300.0
GIVE_UP_SECONDS = 10.0
# Tensors start at multiples of this in the shared buffer, so that every dtype is aligned.
ALIGNMENT_BYTES = 64
PICKLE_PROTOCOL = 4
INCOMPLETE = "incomplete"


@dataclasses.dataclass
class TensorWeightChannel:
    """Sends tensors to engines on this machine through shared memory (SGLang's ``update_weights_from_tensor``).

    Picklable while no update is open. One update at a time.

    Attributes:
        engine_urls: The engines themselves, not the router: it knows no control traffic.
        tp_size: Tensor parallel size of one engine. Every rank reads the same full tensors and takes its part.
        timeout: Time limit of one request in seconds.
    """

    engine_urls: tuple[str, ...]
    tp_size: int = 1
    timeout: float = REQUEST_TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        self.engine_urls = tuple(url.rstrip("/") for url in self.engine_urls)
        self._version: int | None = None
        self._buffer: torch.Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_version": None, "_buffer": None}

    def begin(self, version: int) -> None:
        """Pause generation and open the update on every engine. What is in flight goes on after :meth:`end`.

        Raises:
            WeightSyncError: An engine refused, or an update is already open on this channel.
        """
        if self._version is not None:
            raise WeightSyncError(
                f"the update to version {self._version} is still open; end it before version {version}"
            )
        self._version = version
        with self._giving_up_on_error():
            self._on_all(lambda url: self._post(url, "/pause_generation", {"mode": "retract"}))
            self._on_all(self._open)

    def send(self, bucket: NamedTensors) -> None:
        """Load some tensors into every engine; return when all have them.

        Args:
            bucket: Hugging Face names with tensors on any device. They are copied, and may be changed afterwards.

        Raises:
            WeightSyncError: An engine refused, or :meth:`begin` was not called.
        """
        self._require_open()
        if not bucket:
            return
        with self._giving_up_on_error():
            shared = self._copied(bucket)
            # A handle counts as one reference, given up by who reads it: each rank of each engine needs its own.
            handles = {url: [_handles(shared) for _ in range(self.tp_size)] for url in self.engine_urls}
            self._on_all(lambda url: self._load(url, handles[url]))

    def end(self) -> dict[str, str]:
        """Close the update; return when every engine has confirmed the version and generates again.

        Returns:
            No checksums: these engines tell none.

        Raises:
            WeightSyncError: An engine refused, or says that it has another version.
        """
        version = str(self._require_open())
        with self._giving_up_on_error():
            self._on_all(lambda url: self._close(url, version))
        self._version = None
        return {}

    def close(self) -> None:
        """Give the shared memory back, which is as large as the largest bucket; another update takes some anew.

        It is kept from one update to the next. Of a process that is killed, whoever supervises it has to remove the
        file in ``/dev/shm``.
        """
        self._buffer = None

    def _require_open(self) -> int:
        if self._version is None:
            raise WeightSyncError("no update is open; call begin(version) first")
        return self._version

    def _open(self, url: str) -> None:
        try:
            self._post(url, "/begin_weight_update", {})
        except WeightSyncError as error:
            if "already open" not in str(error):
                raise
            logger.warning("%s has an update open that nobody ended; closing it", url)
            self._post(url, "/end_weight_update", {})
            self._post(url, "/begin_weight_update", {})

    def _load(self, url: str, handles: list[str]) -> None:
        self._post(url, "/update_weights_from_tensor", {"serialized_named_tensors": handles, "flush_cache": False})

    def _close(self, url: str, version: str) -> None:
        self._post(url, "/end_weight_update", {})
        self._post(url, "/flush_cache", {})
        self._post(url, "/update_weight_version", {"new_version": version, "abort_all_requests": False})
        confirmed = engine_weight_version(url)
        if confirmed != version:
            raise WeightSyncError(f"{url} says it has weight version {confirmed!r} after version {version!r} was sent")
        self._post(url, "/continue_generation", {})

    def _post(self, url: str, path: str, payload: dict[str, Any]) -> None:
        try:
            answer = call("POST", url + path, payload, timeout=self.timeout)
        except HttpError as error:
            raise WeightSyncError(f"weight version {self._version}: {error}") from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise WeightSyncError(f"weight version {self._version}: {url}{path}: {answer.get('message')}")

    def _on_all(self, action: Callable[[str], None]) -> None:
        """Do something on all engines at once; wait for all, then raise the first error."""
        with concurrent.futures.ThreadPoolExecutor(len(self.engine_urls)) as pool:
            futures = [pool.submit(action, url) for url in self.engine_urls]
        for future in futures:
            future.result()

    @contextlib.contextmanager
    def _giving_up_on_error(self) -> Iterator[None]:
        """After an error, leave no engine paused or with an open update, and none that claims to have good weights."""
        try:
            yield
        except BaseException:
            self._version = None
            self._on_all(_give_up)
            raise

    def _copied(self, bucket: NamedTensors) -> NamedTensors:
        """The bucket as views of one shared buffer, which is kept for the next bucket."""
        sizes = [_aligned(tensor.numel() * tensor.element_size()) for _, tensor in bucket]
        if self._buffer is None or self._buffer.numel() < sum(sizes):
            with _file_system_sharing():
                self._buffer = torch.empty(sum(sizes), dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        views, start = [], 0
        for (name, tensor), size in zip(bucket, sizes, strict=True):
            bytes_needed = tensor.numel() * tensor.element_size()
            view = self._buffer[start : start + bytes_needed].view(tensor.dtype).view(tensor.shape)
            view.copy_(tensor.detach())
            views.append((name, view))
            start += size
        return views


def _give_up(url: str) -> None:
    for path, payload in (
        ("/end_weight_update", {}),
        ("/update_weight_version", {"new_version": INCOMPLETE, "abort_all_requests": False}),
        ("/continue_generation", {}),
    ):
        with contextlib.suppress(HttpError):
            call("POST", url + path, payload, timeout=GIVE_UP_SECONDS)


def engine_weight_version(url: str) -> str:
    """The weight version that an engine stamps on its samples.

    Raises:
        WeightSyncError: It does not answer, or it is no SGLang engine.
    """
    try:
        return str(call("GET", f"{url}/model_info", attempts=3)["weight_version"])
    except HttpError as error:
        raise WeightSyncError(f"cannot ask for the weight version: {error}") from error
    except (KeyError, TypeError) as error:
        raise WeightSyncError(f"{url}/model_info names no weight version; give the address of an engine") from error


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _handles(shared: NamedTensors) -> str:
    """Names, and where in shared memory the tensors are, as SGLang reads them."""
    stream = io.BytesIO()
    with _file_system_sharing():
        ForkingPickler(stream, PICKLE_PROTOCOL).dump(list(shared))
    return base64.b64encode(stream.getvalue()).decode()


@contextlib.contextmanager
def _file_system_sharing() -> Iterator[None]:
    """Share CPU tensors by name while sending; put the process's own way back.

    The other way passes file descriptors over a socket, which SGLang's scheduler cannot read. Torch keeps a helper
    process, ``torch_shm_manager``, for the names. It is a child of this process and ends after it, but holds its
    standard error open until then.
    """
    before = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]
