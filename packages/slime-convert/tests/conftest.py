"""Tiny models and checkpoints, each made once; processes that die and disks that are full."""

import gc
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slime_convert import hf_to_torch_dist
from support.family_models import CONFIGS, add_prediction_module, make_model


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Nothing here survives a power failure; that everything is flushed in time is shown by a test that counts."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Makes a model once: ``made(name)``. Not to be changed."""
    root, found = tmp_path_factory.mktemp("models"), {}

    def make(name):
        if name not in found:
            found[name] = make_model(name, root / name)
        return found[name]

    return make


# One of each way in which weights are laid out, named or tied; the others are variations of these.
QUICK = {
    *("llama3-scaled", "mixtral-tied", "qwen2-tied", "qwen2-moe", "qwen3-untied", "qwen3-next", "glm4", "glm4-moe"),
    *("deepseek", "deepseek-v32", "glm5", "gpt-oss", "gemma3"),
}


@pytest.fixture(
    params=[pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in sorted(CONFIGS)]
)
def origin(request, made):
    """Each of the models. Not to be changed."""
    return made(request.param)


@pytest.fixture(scope="session")
def one_origin(made):
    """One of the models, where the family does not matter. Not to be changed."""
    return made("qwen3-untied")


@pytest.fixture(scope="session")
def one_converted(one_origin, tmp_path_factory):
    """The ``torch_dist`` checkpoint of ``one_origin``. Not to be changed."""
    path = tmp_path_factory.mktemp("converted") / "td"
    hf_to_torch_dist(one_origin, path)
    return path


@pytest.fixture
def origin_of(tmp_path):
    """Makes one of the models, to be changed."""
    return lambda name, **changes: make_model(name, tmp_path / name, **changes)


@pytest.fixture
def with_prediction_module(origin_of):
    """DeepSeek's tiny model with the weights that transformers leaves out, under Kimi-K2's model type."""
    return add_prediction_module(origin_of("deepseek"), model_type="kimi_k2")


@pytest.fixture
def converted(origin, tmp_path):
    """The ``torch_dist`` checkpoint of ``origin``."""
    hf_to_torch_dist(origin, tmp_path / "converted")
    return tmp_path / "converted"


@pytest.fixture
def full_disk():
    """A stand-in for a full disk: within it no file grows beyond some bytes."""

    @contextmanager
    def limit(nbytes):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit


def _in_child(run):
    """Run a function in a forked process, which has torch imported already; how the process ended."""
    child = os.fork()
    if not child:
        gc.disable()  # it would touch, and so copy, all the memory that the two processes share
        try:
            run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(scope="session")
def in_child():
    """:func:`_in_child`."""
    return _in_child


class Writes:
    """Counts the bytes that are written to files with tensors, and kills the process when there are too many.

    Args:
        limit: Bytes that can be written; the rest of the write in which they end is not.
    """

    def __init__(self, limit=float("inf")):
        self.done, self.limit = 0, limit

    def hook(self, monkeypatch):
        pwrite = os.pwrite

        def counted(descriptor, data, offset):
            written = pwrite(descriptor, data[: min(len(data), self.limit - self.done)], offset)
            self.done += written
            if self.done >= self.limit:
                os.kill(os.getpid(), signal.SIGKILL)
            return written

        monkeypatch.setattr(os, "pwrite", counted)


@pytest.fixture(scope="session")
def bytes_written():
    """Runs a conversion and counts the bytes that it writes."""

    def run(convert):
        with pytest.MonkeyPatch.context() as patch:
            writes = Writes()
            writes.hook(patch)
            convert()
        return writes.done

    return run


@pytest.fixture
def killed_at(monkeypatch):
    """Runs a conversion in a process that kills itself when it has written some bytes."""

    def run(convert, limit):
        def limited():
            Writes(limit).hook(monkeypatch)
            convert()

        assert _in_child(limited) == -signal.SIGKILL

    return run


# What a real megatron-core model on two ranks writes: the model and the parallel sizes. An uneven first stage of two
# of three layers; two virtual stages of one layer on each rank.
LEGACY_RUNS = {
    "llama-tied": {"tp": 1},
    "qwen3-untied": {"tp": 2},
    "qwen3-tied": {"pp": 2, "first": 2},
    "llama3-scaled": {"pp": 2, "vpp": 2},
}


@pytest.fixture(scope="session")
def legacy_runs(tmp_path_factory):
    """Legacy checkpoints, by model: where they are (``save``) and the model they came from (``origin``).

    Not to be changed.
    """
    root, jobs = tmp_path_factory.mktemp("legacy"), {}
    for name, layout in LEGACY_RUNS.items():
        origin = make_model(name, root / name / "origin", **({"num_hidden_layers": 4} if "vpp" in layout else {}))
        hf_to_torch_dist(origin, root / name / "torch_dist")
        paths = {"origin": origin, "torch_dist": root / name / "torch_dist" / "release", "save": root / name / "legacy"}
        jobs[name] = {key: str(path) for key, path in paths.items()} | layout
    program = Path(__file__).parent / "support" / "megatron_ranks.py"
    words = [str(root), json.dumps(list(jobs.values()))]
    ranks = [subprocess.Popen([sys.executable, program, str(rank), *words], stderr=subprocess.PIPE) for rank in (0, 1)]
    try:
        errors = [rank.communicate(timeout=280)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "".join(errors)
    return {name: SimpleNamespace(origin=Path(job["origin"]), save=Path(job["save"])) for name, job in jobs.items()}
