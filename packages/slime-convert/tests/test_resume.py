"""Conversions that are killed, by SIGKILL at an exact byte or step, and run again."""

import json
import os
import re
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slime_convert import ModelShape, output
from slime_convert.convert import hf_to_torch_dist, torch_dist_to_hf
from slime_convert.errors import OutputError, UnfinishedError
from slime_convert.formats import detect
from slime_convert.hf import HfReader
from slime_convert.legacy import LegacyReader
from slime_convert.mapping import WeightMap
from slime_convert.megatron_to_hf import megatron_to_hf
from slime_convert.quantize.convert import fp8_to_bf16, hf_to_fp8, hf_to_int4
from slime_convert.torch_dist import TorchDistReader

SHARD = 12_000  # bytes: several files of several weights
READERS = (HfReader, TorchDistReader, LegacyReader)


def files_of(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def sources(tmp_path_factory, make_model):
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
        name: The command.
        convert: Called with the output and ``force`` and ``on_progress``.
        whole: The output of a run that was left alone.
        order: Names of the weights in the order in which that run loaded them.
        num_bytes: Bytes of tensors that it wrote.
        outputs: Names of the written tensors that a loaded weight gives.
    """

    name: str
    convert: Any
    whole: Path
    order: list[str]
    num_bytes: int
    outputs: Any


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


LOADS = {"hf-to-torch-dist": [(WeightMap, "from_hf")]}
"""What a conversion calls with the name of a weight to load it, where that is not the method of a reader."""


def loads(name, run):
    """Names of the weights that are loaded while ``run`` is."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, method in LOADS.get(name, [(reader, "load") for reader in READERS]):
            load = getattr(owner, method)
            patch.setattr(
                owner, method, lambda self, name, *more, load=load: seen.append(name) or load(self, name, *more)
            )
        run()
    return seen


@pytest.fixture(scope="module")
def case(request, sources, tmp_path_factory, bytes_written):
    """The conversion that a test names."""
    name = request.param
    convert = conversions(sources)[name]
    whole, found = tmp_path_factory.mktemp(name) / "out", []
    order = loads(name, lambda: found.append(bytes_written(lambda: convert(whole))))
    if name.endswith("-to-hf"):
        outputs = WeightMap(ModelShape.from_hf_config(sources["hf"])).hf_parts
    else:
        written = {tensor for path in whole.glob("*.safetensors") for tensor in header_of(path)[0]}

        def outputs(weight):
            ends = ("", "_scale_inv", "_packed", "_scale", "_shape")
            return {weight.removesuffix("_scale_inv") + end for end in ends} & written

    return Case(name, convert, whole, order, found[0], outputs)


def header_of(path):
    """The tensors in a safetensors file in their order, and the names of the finished ones."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    checksums = re.findall(".{8}", header.pop("__metadata__")["crc32"])
    return list(header), [name for name, text in zip(header, checksums, strict=True) if text.strip()]


def left_to_load(case, partial):
    """The weights that an unfinished output still needs, told from what is on the disk."""
    if (partial / "output" / "release").is_dir():
        records = [json.loads(path.read_text()) for path in (partial / "state").glob("*.json")]
        return case.order[sum(len(record["places"]) for record in records) :]
    finished = {name for path in (partial / "output").glob("*.safetensors") for name in header_of(path)[1]}
    return [name for name in dict.fromkeys(case.order) if not finished.issuperset(case.outputs(name))]


def assert_refused(partial):
    """Whoever reads an unfinished output is told so."""
    for path in (partial, partial / "output"):
        for read in (detect, TorchDistReader, HfReader):
            with pytest.raises(UnfinishedError, match="is unfinished"):
                read(path)


QUICK = {"hf-to-torch-dist": range(1, 20), "torch-dist-to-hf": range(1, 20)}
PLACES = [
    pytest.param(name, k, marks=() if k in QUICK.get(name, (7, 16)) else pytest.mark.full)
    for name in ("hf-to-torch-dist", "torch-dist-to-hf", "megatron-to-hf", "hf-to-fp8", "fp8-to-bf16", "hf-to-int4")
    for k in range(1, 20)
]


@pytest.mark.parametrize(("case", "k"), PLACES, indirect=["case"])
def test_killed_at_any_twentieth_it_continues(case, k, tmp_path, killed_at):
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    killed_at(lambda: case.convert(out), case.num_bytes * k // 20)
    assert not out.exists()
    assert_refused(partial)
    left = left_to_load(case, partial)
    calls = []
    assert loads(case.name, lambda: case.convert(out, on_progress=lambda *call: calls.append(call))) == left
    assert (k < 8 or len(left) < len(case.order)) and (k < 8 or calls[0][0] > 0)
    assert files_of(out) == files_of(case.whole)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


FINAL = ["hf-to-torch-dist", pytest.param("torch-dist-to-hf", marks=pytest.mark.full)]


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

    def watched(*args):
        for name in ("rename", "unlink", "rmdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        put_in_place(*args)
        if step is not None:
            os.kill(os.getpid(), signal.SIGKILL)

    patch.setattr(output, "_put_in_place", watched)
    convert()
    return seen


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("case", FINAL, indirect=True)
def test_killed_during_the_final_renaming(case, force, tmp_path, monkeypatch, in_child):
    earlier = {"config.json": b"earlier", "latest_checkpointed_iteration.txt": b"earlier"}

    def begin(place):
        place.mkdir()
        if force:
            (place / "out").mkdir()
            for name, text in earlier.items():
                (place / "out" / name).write_bytes(text)
        return place / "out"

    with monkeypatch.context() as patch:
        first = begin(tmp_path / "first")
        steps = kill_in_the_final_renaming(lambda: case.convert(first, force=force), None, patch)
    # The earlier output goes aside first, and the lock and its directory, which mark what is unfinished, go last.
    assert steps[: 1 + force] == ["rename"] * (1 + force) and steps[-2:] == ["unlink", "rmdir"] and len(steps) >= 5
    new = files_of(case.whole)
    for step in range(len(steps) + 1):
        out = begin(tmp_path / str(step))
        with monkeypatch.context() as patch:
            ended = in_child(
                lambda out=out, step=step, patch=patch: kill_in_the_final_renaming(
                    lambda: case.convert(out, force=force), step, patch
                )
            )
        assert ended == -signal.SIGKILL
        found = files_of(out) if out.exists() else None
        aside = out.parent / ".out.old"
        assert found in ([None, earlier, new] if force else [None, new])
        assert not force or found is not None or files_of(aside) == earlier
        if found == new and not force:
            with pytest.raises(OutputError, match="exists already"):
                case.convert(out)
        else:
            loaded = loads(case.name, lambda out=out: case.convert(out, force=force))
            assert loaded == [] or found == new
        assert files_of(out) == new and [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("case", ["hf-to-torch-dist"], indirect=True)
def test_killed_from_outside(case, tmp_path):
    """When the files have reached a third of their size."""
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    child = os.fork()
    if not child:
        case.convert(out, on_progress=lambda *_: time.sleep(0.05))
        os._exit(0)
    deadline = time.monotonic() + 60
    while sum(path.stat().st_size for path in partial.rglob("*.distcp")) < case.num_bytes / 3:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not out.exists()
    case.convert(out)
    assert files_of(out) == files_of(case.whole)


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
