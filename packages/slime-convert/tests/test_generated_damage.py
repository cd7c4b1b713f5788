"""Any damage to a checkpoint of any format: one line and exit code 2, or a result that `verify` calls equal.

Each command runs in a process that may use little memory and time, whatever the damaged bytes say; whatever it does,
every file that was there before is there afterwards.
"""

import gc
import json
import os
import resource
import shutil
import signal
import struct
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_convert import ModelShape, WeightMap, hf_to_fp8, hf_to_int4, hf_to_torch_dist
from slime_convert.cli import main
from support.family_models import make_model, tree, weights_of, write_adapter, write_gguf

MEMORY, SECONDS = 800 * 2**20, 30
OUT = "new/out"


def legacy(origin, path):
    """What two tensor-parallel ranks save."""
    shape = ModelShape.from_hf_config(origin)
    weight_map, weights = WeightMap(shape, shape.padded_vocab_size(2, 16)), weights_of(origin)
    whole = {name: weight_map.from_hf(name, weights.__getitem__) for name in weight_map.megatron_names()}
    shards = {name: weight_map.split_tp(name, tensor, 2) for name, tensor in whole.items()}
    for rank in range(2):
        place = path / "iter_0000003" / f"mp_rank_0{rank}" / "model_optim_rng.pt"
        place.parent.mkdir(parents=True)
        state = {name: shard[rank].clone() for name, shard in shards.items()}
        args = shape.to_megatron_args() | {"tensor_model_parallel_size": 2}
        torch.save({"model": state, "args": args, "checkpoint_version": 3.0, "iteration": 3}, place)
    (path / "latest_checkpointed_iteration.txt").write_text("3")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """One model in every format. Not to be changed."""
    root = tmp_path_factory.mktemp("sources")
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    make_model("qwen3-tied", root / "hf", layer_types=["full_attention"] * 2, **sizes)
    hf_to_torch_dist(root / "hf", root / "td", part_bytes=20_000)
    hf_to_fp8(root / "hf", root / "fp8")
    hf_to_int4(root / "hf", root / "int4")
    legacy(root / "hf", root / "legacy")
    (root / "gguf").mkdir()
    write_gguf(root / "hf", root / "gguf" / "model.gguf")
    write_adapter(root / "hf", root / "adapter")
    return root


# The command that reads each format, with DAMAGED and ORIGIN for the two inputs.
COMMANDS = {
    "hf": "hf-to-torch-dist --hf-checkpoint DAMAGED --save",
    "td": "torch-dist-to-hf --input-dir DAMAGED --origin-hf-dir ORIGIN --output-dir",
    "legacy": "megatron-to-hf --load DAMAGED --origin-hf-dir ORIGIN --output-dir",
    "fp8": "fp8-to-bf16 --hf-checkpoint DAMAGED --save",
    "int4": "int4-to-bf16 --hf-checkpoint DAMAGED --save",
    "adapter": "merge-lora --hf-checkpoint ORIGIN --adapter DAMAGED --save",
}
VALUES = [10**9, 2**63, -1, 0, 10**400, 1.5, True, None, "", "x", "../../hf/config.json", "/etc/passwd", [], {}, [[]]]
VALUES += [["a"] * 50, "\ud800", {"a": {"b": 1}}]


def nodes(value):
    """Every place in a JSON value: a container and a key of it."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    found = [(value, key) for key in keys]
    return found + [node for key in keys for node in nodes(value[key])]


def changed_json(data, text):
    places = nodes(text)
    if places:
        container, key = data.draw(st.sampled_from(places))
        kind = data.draw(st.sampled_from(["replace", "remove", "rename"]))
        value = data.draw(st.sampled_from(VALUES))
        if kind == "replace" or isinstance(container, list):
            container[key] = value
        else:
            held = container.pop(key)
            if kind == "rename":
                container[str(value)] = held
    return json.dumps(text).encode()


def changed_bytes(data, old):
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "zero", "repeat"]))
    place = data.draw(st.integers(0, max(len(old) - 1, 0)))
    length = data.draw(st.integers(1, 64))
    new = bytearray(old)
    if kind == "flip" and old:
        new[place] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del new[place:]
    elif kind == "insert":
        new[place:place] = data.draw(st.binary(min_size=1, max_size=9))
    elif kind == "zero":
        new[place : place + length] = bytes(len(new[place : place + length]))
    else:
        new[place:place] = new[place : place + length]
    return bytes(new)


def damage(data, root, outside):
    """Change one file of a checkpoint."""
    path = data.draw(st.sampled_from(sorted(path for path in root.rglob("*") if path.is_file())))
    kind = data.draw(st.sampled_from(["bytes"] * 4 + ["json"] * 4 + ["gone", "directory", "pipe", "link", "loop"]))
    old = path.read_bytes()
    if kind == "json" and path.suffix == ".json":
        path.write_bytes(changed_json(data, json.loads(old)))
    elif kind == "json" and path.suffix == ".safetensors":
        (length,) = struct.unpack_from("<Q", old)
        header = changed_json(data, json.loads(old[8 : 8 + length]))
        path.write_bytes(struct.pack("<Q", len(header)) + header + old[8 + length :])
    elif kind in ("bytes", "json"):
        path.write_bytes(changed_bytes(data, old))
    else:
        path.unlink()
        if kind == "directory":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "link":
            path.symlink_to(outside)
        elif kind == "loop":
            path.symlink_to(path.name)


def in_child(call, log):
    """Call a function in a process with little memory; what it raises is an error here."""
    child = os.fork()
    if not child:
        gc.disable()  # it would touch, and so copy, all the memory that the two processes share
        code = 1
        try:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            call()
            code = 0
        except BaseException:
            log.write_text(traceback.format_exc())
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, (code, log.read_text() if log.exists() else "")


def run(log, *words):
    """Run a command with little time; its exit code and what it says."""
    signal.alarm(SECONDS)
    with log.open("w") as said, redirect_stdout(said), redirect_stderr(said):
        try:
            code = main(list(map(str, words)))
        except SystemExit as error:
            code = error.code
    signal.alarm(0)
    return code, log.read_text(errors="replace")


FORMATS = [*COMMANDS, "gguf"]
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.mark.parametrize("name", FORMATS)
@settings(UNHURRIED, max_examples=8)
@given(data=st.data())
def test_any_damage(sources, name, tmp_path_factory, data):
    check(sources, name, tmp_path_factory, data)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FORMATS)
@settings(UNHURRIED, max_examples=100)
@given(data=st.data())
def test_much_damage(sources, name, tmp_path_factory, data):
    check(sources, name, tmp_path_factory, data)


def check(sources, name, tmp_path_factory, data):
    place = tmp_path_factory.mktemp("damaged")
    root, log = place / "home", place / "log"
    shutil.copytree(sources / name, root / "input")
    for stranger in (root / "thesis.tex", root / "input" / "notes.txt", place / "secret"):
        stranger.write_text("years of work")
    damage(data, root / "input", place / "secret")
    before = tree(place)
    in_child(lambda: use(sources, name, root, log), log)
    after = {
        entry: state for entry, state in tree(place).items() if not entry.startswith("home/new") and entry != "log"
    }
    assert after == before and ((root / "new").exists() == (root / OUT).exists())
    shutil.rmtree(place)


def use(sources, name, root, log):
    """Do all that can be done with a damaged checkpoint."""
    for words in (["inspect", root / "input"], ["verify", "--quiet", root / "input", sources / name]):
        if name != "adapter":
            code, said = run(log, *words)
            assert code in (0, 1, 2) and (code != 2 or said.count("\n") == 1) and "Traceback" not in said, (code, said)
            assert "years of work" not in said
    if name in COMMANDS:
        code, said = run(log, *command(sources, name, root / "input"), root / OUT, "--quiet")
        assert code in (0, 2) and said.count("\n") == (code == 2) and "years of work" not in said, (code, said)
        assert (root / OUT).exists() == (code == 0)
        if not code and name != "adapter":
            assert run(log, "verify", root / "input", root / OUT, "--quiet")[0] == 0, log.read_text()


def command(sources, name, damaged):
    return [{"DAMAGED": damaged, "ORIGIN": sources / "hf"}.get(word, word) for word in COMMANDS[name].split()]


def test_the_undamaged_formats_are_equal(sources, tmp_path):
    """Or the property above would prove nothing."""
    log = tmp_path / "log"

    def convert():
        for name in COMMANDS:
            assert run(log, *command(sources, name, sources / name), tmp_path / name, "--quiet") == (0, "")
        both = sources / "gguf", sources / "td"
        assert run(log, "verify", *both, "--tolerance", "0", "--quiet")[0] == 0

    in_child(convert, log)
