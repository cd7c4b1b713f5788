"""What a weight update asks of the engines over HTTP, and whether they hold what was sent."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from slime_core.interfaces import NamedTensors
from slime_rollout.engine.config import REQUEST_TIMEOUT_SECONDS
from slime_rollout.engine.errors import WeightSyncError
from slime_rollout.http import INCOMPLETE, HttpError, call
from slime_rollout.weights.checkpoint import dtype_name, some, tensor_bytes

logger = logging.getLogger(__name__)

GIVE_UP_SECONDS = 10.0
# A slow engine still processes the request after we stop waiting for the response.
LAST_WORD_SECONDS = 1.0
# Weights that SGLang holds as one tensor, along the first dimension.
FUSED = {
    part: (fused, parts)
    for fused, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))
    for part in parts
}
# SGLang pads a vocabulary to a multiple of this.
PADDED, PADDED_ROWS = ("embed_tokens.weight", "lm_head.weight"), 64

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class EngineUpdate:
    """One update of some engines to a weight version.

    Attributes:
        urls: The engines themselves, not the router: it forwards no control requests.
        version: The new weight version.
        timeout: Time limit in seconds of a request that loads no files.
        load_timeout: Time limit of a request that may read all weights; at least ``timeout``.
    """

    urls: tuple[str, ...]
    version: int
    timeout: float = REQUEST_TIMEOUT_SECONDS
    load_timeout: float = REQUEST_TIMEOUT_SECONDS

    def on_all(self, action: Callable[[str], Result]) -> list[Result]:
        """Run an action on all engines in parallel, and wait for all.

        The first error is raised, the others are logged. A `WeightSyncError` names all engines that did not respond:
        they can then be replaced together.
        """
        with concurrent.futures.ThreadPoolExecutor(max(1, len(self.urls))) as pool:
            futures = [pool.submit(action, url) for url in self.urls]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors[1:]:
            logger.error("%s", error)
        if errors and isinstance(errors[0], WeightSyncError):
            errors[0].silent = tuple(
                url for error in errors if isinstance(error, WeightSyncError) for url in error.silent
            )
        return [future.result() for future in futures]

    def post(self, url: str, path: str, payload: dict[str, Any], *, is_long: bool = False) -> Any:
        """Send one request to one engine; ``is_long`` if it may take as long as reading all weights.

        Raises:
            WeightSyncError: The engine refused, or did not respond in time.
        """
        try:
            timeout = max(self.timeout, self.load_timeout) if is_long else self.timeout
            answer = call("POST", url + path, payload, timeout=timeout)
        except HttpError as error:
            text = f"weight version {self.version}: {error}"
            raise WeightSyncError(text, url=url, silent=(url,) if error.timed_out else ()) from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise WeightSyncError(f"weight version {self.version}: {url}{path}: {answer.get('message')}", url=url)
        return answer

    def check_alive(self) -> None:
        """Fail early where an engine does not respond."""
        self.on_all(engine_weight_version)

    def pause(self, mode: str) -> None:
        """Stop generating; requests in flight stay, see :class:`~slime_rollout.weights.channel.EngineChannel`.

        Engines then report no valid version until the update ends: if this process is killed, samples from partly
        updated weights are not taken for samples of the old ones.
        """
        self.on_all(lambda url: self.post(url, "/pause_generation", {"mode": mode}))
        self.on_all(lambda url: self._set_version(url, INCOMPLETE))

    def _set_version(self, url: str, version: str) -> None:
        self.post(url, "/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def open_update(self) -> None:
        """Let tensors be loaded. An update that a killed trainer left open is closed first."""
        self.on_all(self._open_update)

    def _open_update(self, url: str) -> None:
        try:
            self.post(url, "/begin_weight_update", {})
        except WeightSyncError as error:
            if "already open" not in str(error):
                raise
            logger.warning("%s still has an earlier update open; closing it", url)
            self.post(url, "/end_weight_update", {})
            self.post(url, "/begin_weight_update", {})

    def close_update(self) -> None:
        """All tensors are loaded."""
        self.on_all(lambda url: self.post(url, "/end_weight_update", {}))

    def load(self, url: str, path: str) -> None:
        """Have one paused engine load a checkpoint."""
        self.post(url, "/update_weights_from_disk", {"model_path": path, "flush_cache": False}, is_long=True)

    def flush_cache(self, *, must: bool) -> None:
        """Drop the cache of prefixes; it is an error if an engine ``must`` and does not, since requests are running."""
        self.on_all(lambda url: self._flush_cache(url, must))

    def _flush_cache(self, url: str, must: bool) -> None:
        try:
            self.post(url, "/flush_cache", {})
        except WeightSyncError as error:
            refused = isinstance(error.__cause__, HttpError) and error.__cause__.status == 400
            if must or not refused:
                raise
            logger.info("%s has requests running and keeps its cache", url)

    def confirm_version(self) -> None:
        """Set the version and read it back."""
        self.on_all(self._confirm_version)

    def _confirm_version(self, url: str) -> None:
        version = str(self.version)
        self._set_version(url, version)
        if (confirmed := engine_weight_version(url)) != version:
            text = f"{url} says it has weight version {confirmed!r} after version {version!r} was sent"
            raise WeightSyncError(text, url=url)

    def resume(self) -> None:
        """Generate again."""
        self.on_all(lambda url: self.post(url, "/continue_generation", {}))

    def give_up(self) -> None:
        """After an error, leave no engine paused or with an open update, and none that reports a valid version."""
        self.on_all(self._give_up)

    def _give_up(self, url: str) -> None:
        limit = min(GIVE_UP_SECONDS, self.timeout)
        incomplete = {"new_version": INCOMPLETE, "abort_all_requests": False}
        for path, payload in (("/end_weight_update", {}), ("/update_weight_version", incomplete)):
            try:
                call("POST", url + path, payload, timeout=limit)
            except HttpError as error:
                if error.timed_out:  # the next request would time out as well, and everybody waits
                    limit = min(LAST_WORD_SECONDS, self.timeout)
                    break
        with contextlib.suppress(HttpError):
            call("POST", f"{url}/continue_generation", {}, timeout=limit)


def engine_weight_version(url: str) -> str:
    """The weight version that an engine stamps on its samples."""
    try:
        return str(call("GET", f"{url}/model_info", attempts=3)["weight_version"])
    except HttpError as error:
        silent = (url,) if error.timed_out else ()
        raise WeightSyncError(f"cannot ask for the weight version: {error}", url=url, silent=silent) from error
    except (KeyError, TypeError) as error:
        text = f"{url}/model_info names no weight version; give the address of an engine"
        raise WeightSyncError(text, url=url) from error


class SentDigests:
    """SHA-256 of what was sent, under the names that engines use: SGLang's checksum on CPU engines."""

    def __init__(self) -> None:
        self._expected: dict[str, set[str]] = {}
        self._fusing: dict[str, tuple[int, Any]] = {}
        self.dtypes: set[str] = set()

    def add(self, bucket: NamedTensors) -> None:
        """Add some tensors."""
        for name, tensor in bucket:
            self.dtypes.add(dtype_name(tensor.dtype))
            content = tensor_bytes(tensor)
            digest = hashlib.sha256(content)
            self._expected[name] = {_short(digest)}
            if name.endswith(PADDED) and tensor.shape[0] % PADDED_ROWS:
                missing = -tensor.shape[0] % PADDED_ROWS
                digest.update(bytes(missing * len(content) // tensor.shape[0]))
                self._expected[name].add(_short(digest))
            self._fuse(name, content)

    def _fuse(self, name: str, content: memoryview) -> None:
        """Continue a fused tensor, if its parts come in their order."""
        *module, part, kind = name.split(".") if name.count(".") else ("", name, "")
        if part not in FUSED:
            return
        fused, parts = FUSED[part]
        whole = ".".join((*module, fused, kind))
        place, digest = self._fusing.get(whole, (0, hashlib.sha256()))
        if parts[place] != part:
            return
        digest.update(content)
        self._fusing[whole] = (place + 1, digest)
        if place + 1 == len(parts):
            self._expected[whole] = {_short(digest)}
            del self._fusing[whole]

    def compare(self, held: dict[str, str]) -> tuple[list[str], list[str]]:
        """Of what was sent: names with the same checksum at an engine, and names with another one there."""
        known = [name for name in held if name in self._expected]
        same = [name for name in known if held[name] in self._expected[name]]
        return same, sorted(set(known) - set(same))


def check_engines(update: EngineUpdate, sent: SentDigests, *, tp_size: int) -> None:
    """Compare checksums that the engines compute themselves (SGLang's ``/weights_checker``).

    All engines are compared with each other. With what was sent they are compared only where they report a checksum of
    it: on CPU (SHA-256; on CUDA it is a kernel of SGLang's), without tensor parallelism (a rank holds a part of most
    tensors), and in the dtype that was sent. Elsewhere engines that all hold the same wrong weights are not noticed; a
    warning says so.

    Raises:
        WeightSyncError: Naming an engine, and tensors that differ.
    """
    if not update.urls:
        return
    version, first = update.version, update.urls[0]
    held = update.on_all(lambda url: _checksums(update, url))
    for url, ranks in zip(update.urls, held, strict=True):
        if other := _different(ranks, held[0]):
            raise WeightSyncError(
                f"weight version {version}: {url} holds other weights than {first}: {some(other)}; "
                "send the weights again",
                url=url,
            )
    if (reason := _why_not_comparable(first, sent, tp_size)) is not None:
        logger.warning("weight version %d: engines hold the same; not compared with what was sent: %s", version, reason)
        return
    same, different = sent.compare(held[0][0])
    if different or not same:
        raise WeightSyncError(
            f"weight version {version}: {first} does not hold what was sent: "
            f"{some(different) or 'no tensor has a name that was sent'}; send the weights again",
            url=first,
        )
    logger.info("weight version %d: %d tensors of %d engines are what was sent", version, len(same), len(held))


def _checksums(update: EngineUpdate, url: str) -> list[dict[str, str]]:
    """Checksums of what an engine holds, by its own names, for each of its ranks."""
    answer = update.post(url, "/weights_checker", {"action": "checksum"}, is_long=True)
    try:
        return [dict(rank["checksums"]) for rank in answer["ranks"]]
    except (KeyError, TypeError) as error:
        raise WeightSyncError(f"{url}/weights_checker gives no checksums: {str(answer)[:200]}", url=url) from error


def _why_not_comparable(url: str, sent: SentDigests, tp_size: int) -> str | None:
    if tp_size > 1:
        return "every rank holds a part"
    try:
        info = call("GET", f"{url}/server_info", attempts=3)
        device, dtype = info["device"], info["dtype"]
    except (HttpError, KeyError, TypeError) as error:
        raise WeightSyncError(f"{url} does not report its device and dtype: {error}", url=url) from error
    if device != "cpu":
        return f"engines on {device} compute another kind of checksum"
    if sent.dtypes != {dtype}:
        return f"{', '.join(sorted(sent.dtypes))} was sent and the engine has {dtype}"
    return None


def _different(ranks: list[dict[str, str]], others: list[dict[str, str]]) -> list[str]:
    if len(ranks) != len(others):
        return [f"{len(ranks)} ranks instead of {len(others)}"]
    pairs = zip(ranks, others, strict=True)
    return sorted({name for one, other in pairs for name in one.keys() | other if one.get(name) != other.get(name)})


def _short(digest: Any) -> str:
    return str(digest.hexdigest()[:16])
