"""Conversions that are killed, by SIGKILL at an exact byte or step, and run again."""

import os
import select
import shutil
import signal
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from slime_convert import fp8_to_bf16, hf_to_fp8, hf_to_int4, hf_to_torch_dist, megatron_to_hf, torch_dist_to_hf
from slime_convert.errors import OutputError, UnfinishedError
from slime_convert.files import output
from slime_convert.files.output import new_directory
from slime_convert.files.partial import Conversion
from slime_convert.formats import detect
from slime_convert.formats.hf import HfWeights
from support.family_models import make_model, tree

SHARD = 12_000  # bytes: several files of several weights


def files_of(root):
    """Bytes of each file below a directory, the list of files included."""
    return {name: content for name, (_, content) in tree(root).items() if content is not None}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A model with sizes that can be quantized, in every format that is read. Not to be changed."""
    root = tmp_path_factory.mktemp("sources")
    hf = make_model("qwen3-tied", root / "hf", hidden_size=32, intermediate_size=64, num_attention_heads=4)
    hf_to_torch_dist(hf, root / "td")
    hf_to_fp8(hf, root / "fp8")
    return {"hf": hf, "td": root / "td", "fp8": root / "fp8"}


@dataclass
class Case:
    """One conversion.

    Attributes:
        convert: Called with the output and ``force`` and ``on_progress``.
        whole: The output of a run that was left alone.
        writes: What that run wrote to files with tensors: file, place and bytes of each call.
        begun: How many of those calls created the files, before the first weight.
    """

    convert: Any
    whole: Path
    writes: list[tuple[str, int, bytes]]
    begun: int

    @property
    def num_bytes(self):
        return sum(len(data) for _, _, data in self.writes)


def conversions(sources):
    hf, td = sources["hf"], sources["td"]
    return {
        "hf-to-torch-dist": lambda out, **kw: hf_to_torch_dist(hf, out, part_bytes=SHARD, **kw),
        "torch-dist-to-hf": lambda out, **kw: torch_dist_to_hf(td, out, hf, max_shard_bytes=SHARD, **kw),
        "megatron-to-hf": lambda out, **kw: megatron_to_hf(td / "release", out, hf, max_shard_bytes=SHARD, **kw),
        "hf-to-fp8": lambda out, **kw: hf_to_fp8(hf, out, max_shard_bytes=SHARD, **kw),
        "fp8-to-bf16": lambda out, **kw: fp8_to_bf16(sources["fp8"], out, max_shard_bytes=SHARD, **kw),
        "hf-to-int4": lambda out, **kw: hf_to_int4(hf, out, max_shard_bytes=SHARD, **kw),
    }


def writes_of(run):
    """What is written to files with tensors while ``run`` is called with a function for the progress.

    Returns:
        The writes, how many of them came before the first call about progress, and the bytes that this call said.
    """
    seen, first, pwrite = [], [], os.pwrite

    def watched(descriptor, data, offset):
        seen.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, offset, bytes(data)))
        return pwrite(descriptor, data, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", watched)
        run(lambda done, total: first or first.append((len(seen), done)))
    return seen, *first[0]


@pytest.fixture(scope="module")
def case(request, sources, tmp_path_factory):
    """The conversion that a test names."""
    convert = conversions(sources)[request.param]
    whole = tmp_path_factory.mktemp(request.param) / "out"
    writes, begun, done = writes_of(lambda on_progress: convert(whole, on_progress=on_progress))
    assert done == 0 and len({file for file, _, _ in writes}) > 1
    return Case(convert, whole, writes, begun)


def assert_refused(partial):
    """Whoever reads an unfinished output is told so."""
    for path in (partial, partial / "output"):
        for read in (detect, HfWeights):
            with pytest.raises(UnfinishedError, match="is unfinished"):
                read(path)


QUICK = {"hf-to-torch-dist": range(1, 20, 2), "torch-dist-to-hf": range(1, 20, 3)}
PLACES = [
    pytest.param(name, k, marks=() if k in QUICK.get(name, (7, 16)) else pytest.mark.full)
    for name in ("hf-to-torch-dist", "torch-dist-to-hf", "megatron-to-hf", "hf-to-fp8", "fp8-to-bf16", "hf-to-int4")
    for k in range(1, 20)
]


@pytest.mark.parametrize(("case", "k"), PLACES, indirect=["case"])
def test_killed_at_any_twentieth_it_continues(case, k, tmp_path, killed_at):
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    limit = case.num_bytes * k // 20
    killed_at(lambda: case.convert(out), limit)
    assert not out.exists()
    assert_refused(partial)
    writes, begun, done = writes_of(lambda on_progress: case.convert(out, on_progress=on_progress))
    # The call within which the process was killed: a weight is one call, and its checksum one or two more.
    last = sum(end < limit for end in accumulate(len(data) for _, _, data in case.writes))
    if last < case.begun:
        assert done == 0 and writes[begun:] == case.writes[case.begun :]
    else:
        # What was finished is not written again: all but the weight in which the kill fell.
        first = len(case.writes) - len(writes)
        assert begun == 0 and last - 2 <= first <= last + 1 and writes == case.writes[first:]
        assert done > 0 or first <= case.begun
    assert k < 16 or done > 0
    assert files_of(out) == files_of(case.whole)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def kill_in_the_final_renaming(convert, step, patch):
    """Run in a process that kills itself after some steps of the final renaming; or tell which there are."""
    put_in_place, seen = output._put_in_place, []

    def counted(call):
        def run(*args, **kwargs):
            if len(seen) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            seen.append(call.__name__)
            return call(*args, **kwargs)

        return run

    def watched(*args, **kwargs):
        for name in ("rename", "unlink", "rmdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        put_in_place(*args, **kwargs)
        if step is not None:
            os.kill(os.getpid(), signal.SIGKILL)

    patch.setattr(output, "_put_in_place", watched)
    convert()
    return seen


def earlier_output(out):
    with new_directory(out, Conversion("test", ()), force=False) as unfinished:
        for name in ("config.json", "release/common.pt"):
            unfinished.write(name, b"earlier")


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "case", ["hf-to-torch-dist", pytest.param("torch-dist-to-hf", marks=pytest.mark.full)], indirect=True
)
def test_killed_during_the_final_renaming(case, force, tmp_path, monkeypatch, in_child):
    def begin(place):
        place.mkdir()
        if force:
            earlier_output(place / "out")
        return place / "out"

    earlier = files_of(begin(tmp_path / "earlier")) if force else None
    with monkeypatch.context() as patch:
        first = begin(tmp_path / "first")
        steps = kill_in_the_final_renaming(lambda: case.convert(first, force=force), None, patch)
    # The earlier output goes aside first, and what marks the output as unfinished goes last.
    assert steps[: 1 + force] == ["rename"] * (1 + force) and steps[-1] == "rmdir" and len(steps) >= 5
    new = files_of(case.whole)
    for step in range(len(steps) + 1):
        out = begin(tmp_path / str(step))
        aside = out.parent / ".out.partial" / "earlier"
        with monkeypatch.context() as patch:
            ended = in_child(
                lambda out=out, step=step, patch=patch: kill_in_the_final_renaming(
                    lambda: case.convert(out, force=force), step, patch
                )
            )
        assert ended == -signal.SIGKILL
        found = files_of(out) if out.exists() else None
        assert found in (None, earlier, new)
        assert not force or found is not None or files_of(aside) == earlier
        # A process that is killed while it removes its own directory leaves that, with nothing converted in it.
        for going in out.parent.glob(".slime-convert-*"):
            assert {path.name for path in going.iterdir()} <= {"conversion.json", "files", "lock"}
            shutil.rmtree(going)
        if found == new and not force:
            with pytest.raises(OutputError, match="exists already"):
                case.convert(out)
        else:
            writes, _, _ = writes_of(
                lambda on_progress, out=out: case.convert(out, force=force, on_progress=on_progress)
            )
            assert writes == [] or found == new
        assert files_of(out) == new and [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("case", ["hf-to-torch-dist"], indirect=True)
def test_killed_from_outside(case, tmp_path):
    """When a third of the bytes is written."""
    out = tmp_path / "out"
    reading, writing = os.pipe()

    def tell(done, total):
        if done > total / 3:
            os.write(writing, b"x")
            signal.pause()

    child = os.fork()
    if not child:
        case.convert(out, on_progress=tell)
        os._exit(0)
    try:
        assert select.select([reading], [], [], 60)[0]
    finally:
        os.kill(child, signal.SIGKILL)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.close(reading)
        os.close(writing)
    assert ended == -signal.SIGKILL and not out.exists()
    _, _, done = writes_of(lambda on_progress: case.convert(out, on_progress=on_progress))
    assert done > 0 and files_of(out) == files_of(case.whole)


@pytest.mark.parametrize("case", ["hf-to-torch-dist", "torch-dist-to-hf"], indirect=True)
def test_a_flipped_byte_in_what_was_kept_is_noticed(case, tmp_path, killed_at):
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    killed_at(lambda: case.convert(out), case.num_bytes * 3 // 4)
    path = min(path for pattern in ("*.distcp", "*.safetensors") for path in partial.rglob(pattern))
    wrong = bytearray(path.read_bytes())
    wrong[len(wrong) // 2] ^= 32
    path.write_bytes(wrong)
    case.convert(out)
    assert files_of(out) == files_of(case.whole)


def test_a_changed_input_begins_anew(sources, tmp_path, killed_at, bytes_written):
    hf, out = tmp_path / "hf", tmp_path / "out"
    shutil.copytree(sources["hf"], hf)
    num_bytes = bytes_written(lambda: hf_to_torch_dist(hf, tmp_path / "first", part_bytes=SHARD))
    killed_at(lambda: hf_to_torch_dist(hf, out, part_bytes=SHARD), num_bytes // 2)
    os.utime(hf / "config.json", (1, 1))
    calls = []
    hf_to_torch_dist(hf, out, part_bytes=SHARD, on_progress=lambda *call: calls.append(call))
    assert calls[0][0] == 0 and files_of(out) == files_of(tmp_path / "first")
