"""Mistakes of version 0.1, at the command line, where no test of a single part shows it."""

import argparse
import json
import pickle
import shutil
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from slime_convert import ModelShape, WeightMap, hf_to_torch_dist, torch_dist_to_hf, verify
from slime_convert.cli import main
from slime_convert.errors import HfConfigError
from support.family_models import (
    add_prediction_module,
    assert_same_weights,
    change_config,
    tree,
    weights_of,
    write_model,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
LIMIT_S, LIMIT_BYTES = 60, 30 * 2**20


@pytest.fixture(autouse=True)
def no_lines_of_progress(monkeypatch):
    """However slow the machine is."""
    for name in ("_LOG_PAUSE_SECONDS", "_LOG_SECONDS"):
        monkeypatch.setattr(f"slime_convert.progress.{name}", float("inf"))


@pytest.fixture
def told(capsys):
    """Runs a command that is to end with a code, and returns its one line; a traceback is more than one."""

    def run(*words, code=2):
        capsys.readouterr()
        assert main([str(word) for word in words]) == code
        out, err = capsys.readouterr()
        assert "Traceback" not in err and err.count("\n") <= 1
        return err if code == 2 else out

    return run


@pytest.fixture
def origin(one_origin, tmp_path):
    """A model, to be changed."""
    return shutil.copytree(one_origin, tmp_path / "hf")


@pytest.fixture
def td(one_converted, tmp_path):
    """A ``torch_dist`` checkpoint, to be changed."""
    return shutil.copytree(one_converted, tmp_path / "td")


def readers(checkpoint, origin, output):
    """The words of every command that reads a Megatron checkpoint."""
    return [
        ["inspect", checkpoint],
        ["inspect", checkpoint, "--json"],
        ["verify", checkpoint, origin],
        ["megatron-to-hf", "--load", checkpoint, "--origin-hf-dir", origin, "--output-dir", output],
    ]


class TestWhatIsNotOursStays:
    def test_a_link_in_the_place_of_the_unfinished_output(self, one_origin, tmp_path, told):
        """Its target was emptied, even by a command that was refused because the output exists."""
        home = tmp_path / "home"
        (home / "photos").mkdir(parents=True)
        (home / "thesis.tex").write_text("years")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "x").touch()
        (tmp_path / ".out.partial").symlink_to("home")
        before = tree(tmp_path)
        for force in ([], ["--force"]):
            told("hf-to-torch-dist", "--hf-checkpoint", one_origin, "--save", tmp_path / "out", *force)
            assert tree(tmp_path) == before

    @pytest.mark.parametrize("name", ["iter_0001000/__0_0.distcp", "release/mp_rank_00/model_optim_rng.pt"])
    def test_a_training_run_in_the_place_of_the_output(self, one_origin, tmp_path, told, name):
        """Every trainer writes the tracker, which was taken for a sign of an earlier output."""
        run = tmp_path / "run"
        (run / name).parent.mkdir(parents=True)
        (run / name).write_bytes(b"weeks")
        (run / "latest_checkpointed_iteration.txt").write_text(name.partition("/")[0].removeprefix("iter_"))
        before = tree(tmp_path)
        line = told("hf-to-torch-dist", "--hf-checkpoint", one_origin, "--save", run, "--force")
        assert "is not as slime-convert wrote it" in line and tree(tmp_path) == before

    def test_parents_of_a_refused_output_are_not_made(self, origin, tmp_path, told):
        (origin / "model.safetensors.index.json").unlink()
        (shard, *_) = sorted(origin.glob("*.safetensors"))
        shard.unlink()
        told("hf-to-torch-dist", "--hf-checkpoint", origin, "--save", tmp_path / "new" / "a" / "b")
        assert not (tmp_path / "new").exists()


class TestWeightsAreNotLost:
    def test_an_output_layer_beside_a_switch_that_is_a_text(self, made, tmp_path, told):
        """``"false"`` counted as true, and the output layer was dropped."""
        weights = weights_of(made("qwen3-tied"))
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
        model = write_model(tmp_path / "model", weights, made("qwen3-tied") / "config.json")
        change_config(model, tie_word_embeddings="false")
        line = told("hf-to-torch-dist", "--hf-checkpoint", model, "--save", tmp_path / "td")
        assert 'tie_word_embeddings is "false" in ' in line and not (tmp_path / "td").exists()

    def test_one_expert_of_another_type(self, made, tmp_path, told):
        """Only the type of the first was recorded, so that the checkpoint could not be read."""
        weights = weights_of(made("qwen3-moe"))
        for kind in ("gate_proj", "up_proj", "down_proj"):
            name = f"model.layers.1.mlp.experts.2.{kind}.weight"
            weights[name] = weights[name].float()
        model = write_model(tmp_path / "model", weights, made("qwen3-moe") / "config.json")
        line = told("hf-to-torch-dist", "--hf-checkpoint", model, "--save", tmp_path / "td")
        assert "Megatron keeps them in one tensor; save the model with one type" in line
        assert not (tmp_path / "td").exists()

    def test_copies_that_hold_a_nan_are_copies(self, origin_of, tmp_path):
        """A NaN is equal to no number, but to its own bits."""
        model = add_prediction_module(origin_of("glm4-moe"))
        weights = weights_of(model)
        for name, copy in (("model.embed_tokens", "embed_tokens"), ("lm_head", "shared_head.head")):
            weights[f"{name}.weight"].view(torch.int16)[0, :2] = 0x7FC1
            weights[f"model.layers.3.{copy}.weight"] = weights[f"{name}.weight"].clone()
        model = write_model(tmp_path / "nan", weights, model / "config.json")
        hf_to_torch_dist(model, tmp_path / "td")
        torch_dist_to_hf(tmp_path / "td", tmp_path / "back", model)
        assert_same_weights(tmp_path / "back", weights)


MUCH = {
    "a place in the memo": b"\x80\x02]r\x00\x00\x00\x08.",
    "the last place in the memo": b"\x80\x02]r\xff\xff\xff\x7f.",
    "bytes by a call": b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "bytes by a call, older": b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "a name in torch": b"\x80\x02ctorch\nempty\nJ\xff\xff\xff\x7f\x85R.",
}


@pytest.mark.timeout(LIMIT_S)
class TestMemoryOfAFewBytes:
    """Nine bytes could ask for 32 GiB, in ``inspect`` too."""

    def assert_cheap(self, capsys, commands, code=2):
        for words in commands:
            tracemalloc.start()
            found = main([str(word) for word in words])
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            err = capsys.readouterr().err
            assert (found, "Traceback" in err) == (code, False) and peak < LIMIT_BYTES

    @pytest.mark.parametrize("pickled", MUCH.values(), ids=list(MUCH))
    @pytest.mark.parametrize("place", [".metadata", "common.pt", "legacy"])
    def test_of_a_pickle(self, td, one_origin, tmp_path, capsys, place, pickled):
        path = td / "release" / place
        if place == "legacy":
            shutil.rmtree(td)
            path = td / "mp_rank_00" / "model_optim_rng.pt"
            path.parent.mkdir(parents=True)
        if place == ".metadata":
            path.write_bytes(pickled)
        else:
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("archive/data.pkl", pickled)
                archive.writestr("archive/version", "3\n")
        commands = readers(td, one_origin, tmp_path / "out")
        if place == "common.pt":  # one without arguments is not damaged
            self.assert_cheap(capsys, commands[:1], code=0)
        else:
            self.assert_cheap(capsys, [commands[0], commands[-1]])

    @pytest.mark.parametrize("legacy", [False, True])
    def test_of_a_compressed_archive(self, td, capsys, legacy):
        """A megabyte on the disk that is a gigabyte in memory."""
        path = td / "release" / "common.pt"
        if legacy:
            shutil.rmtree(td)
            path = td / "mp_rank_00" / "model_optim_rng.pt"
            path.parent.mkdir(parents=True)
        block = b"]0" * 2**19
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            with archive.open("archive/data.pkl", "w") as file:
                file.write(b"\x80\x02")
                for _ in range(40):
                    file.write(block)
                file.write(b"}.")
            archive.writestr("archive/version", "3\n")
        assert path.stat().st_size < 2**20
        self.assert_cheap(capsys, [["inspect", td]])


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3-untied", {"num_hidden_layers": 10**9, "layer_types": ...}),
        ("qwen3-untied", {"num_hidden_layers": 10**5, "layer_types": ...}),
        ("qwen3-moe", {"num_experts": 10**9, "num_local_experts": ...}),
        ("qwen3-moe", {"num_experts": 10**6, "num_local_experts": ...}),
        ("glm4-moe", {"num_hidden_layers": 10**5, "n_routed_experts": 10**6, "mlp_layer_types": ...}),
        ("deepseek", {"num_nextn_predict_layers": 10**9, "num_mtp_layers": ...}),
        ("deepseek", {"num_nextn_predict_layers": 10**3, "num_mtp_layers": ...}),
        ("gpt-oss", {"num_local_experts": 10**9, "num_hidden_layers": 10**5, "layer_types": ...}),
    ],
)
def test_numbers_in_a_config_take_no_memory(made, one_converted, tmp_path, told, name, changes):
    """A name was made for every weight that the config promises, before a file was looked at."""
    model = shutil.copytree(made(name), tmp_path / "model")
    change_config(model, **changes)
    tracemalloc.start()
    try:
        told("hf-to-torch-dist", "--hf-checkpoint", model, "--save", tmp_path / "out")
        told("torch-dist-to-hf", "--input-dir", one_converted, "--origin-hf-dir", model, "--output-dir", tmp_path / "o")
        told("inspect", model, code=0)
        assert tracemalloc.get_traced_memory()[1] < LIMIT_BYTES
    finally:
        tracemalloc.stop()
    # Whether it can be compared or not: no traceback, and no "they differ" that nobody has found.
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def with_arguments(td, **changes):
    path = td / "release" / "common.pt"
    common = torch.load(path, weights_only=False)
    torch.save(common | {"args": {**common["args"], **changes}}, path)


@pytest.mark.timeout(LIMIT_S)
class TestRecordedArguments:
    def test_lists_that_hold_one_another(self, td, one_origin, tmp_path, told):
        """Ten lists of ten references were walked along 10**10 ways."""
        shared, own = ["leaf"], []
        for _ in range(20):
            shared = [shared] * 10
        own.append(own)
        with_arguments(td, shared=shared, own=own)
        for words in readers(td, one_origin, tmp_path / "out"):
            told(*words, code=0)
        assert_same_weights(tmp_path / "out", one_origin)

    @pytest.mark.parametrize(
        "value",
        [10**400, 10**5000, -(10**400), float("nan"), "x" * 10**5, [10**400]],
        ids=["large", "unprintable", "small", "nan", "text", "list"],
    )
    @pytest.mark.parametrize("name", ["rotary_base", "num_layers"])
    def test_numbers_that_no_float_holds(self, td, one_origin, tmp_path, capsys, name, value):
        with_arguments(td, **{name: value})
        for words in readers(td, one_origin, tmp_path / "out"):
            code = main([str(word) for word in words])
            err = capsys.readouterr().err
            assert code in (0, 2) and "Traceback" not in err and len(err) < 5000
        if not isinstance(value, list):
            assert code == 2 and not (tmp_path / "out").exists()

    @pytest.mark.parametrize("held", ["a text", "a foreign object", "code"])
    def test_a_checkpoint_that_records_none_says_so(self, td, one_origin, tmp_path, capsys, held):
        """Nothing was compared then with the config, and nothing said."""
        path = td / "release" / "common.pt"
        if held == "code":
            torch.jit.script(torch.nn.Identity()).save(path)
        else:
            torch.save("hello" if held == "a text" else {"args": Path("x")}, path)
        words = ["torch-dist-to-hf", "--input-dir", td, "--origin-hf-dir", one_origin, "--output-dir", tmp_path / "out"]
        code = main([str(word) for word in words])
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert (code == 0 and "note: " in err and "records no arguments" in err) or (code == 2 and "common.pt" in err)


class TestLiesAboutTensors:
    def change(self, td, change):
        """Change the record of one stored tensor, and the places of all."""
        path = td / "release" / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        change(metadata.state_dict_metadata["embedding.word_embeddings.weight"], metadata.storage_data.values())
        path.write_bytes(pickle.dumps(metadata))

    @pytest.mark.parametrize(
        "change",
        [
            lambda record, _: setattr(record, "size", torch.Size([2, 2**40, 2**40])),
            lambda record, _: setattr(record, "size", (10**5000, 24)),
            lambda record, _: setattr(record.properties, "dtype", torch.complex64),
            lambda record, places: [vars(place).pop("offset") for place in places],
            lambda record, places: [setattr(place, "offset", 2**70) for place in places],
        ],
        ids=["size", "digits", "type", "no place", "a far place"],
    )
    def test_they_are_refused_in_one_line(self, td, one_origin, tmp_path, told, change):
        self.change(td, change)
        for words in readers(td, one_origin, tmp_path / "out"):
            told(*words)
        assert [path.name for path in tmp_path.iterdir()] == ["td"]

    @pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e5m2fnuz])
    def test_another_type_of_the_same_size(self, td, one_origin, tmp_path, told, dtype):
        """Only the file itself tells then; ``inspect`` reads nothing of it."""
        self.change(td, lambda record, _: setattr(record.properties, "dtype", dtype))
        for words in readers(td, one_origin, tmp_path / "out")[2:]:
            told(*words)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.int8, torch.float8_e5m2fnuz])
    def test_types_that_no_model_is_trained_in(self, one_origin, tmp_path, told, dtype):
        """Whether they were stored so in truth: an "int8" model came of it, or a traceback."""
        weight_map, weights = WeightMap(ModelShape.from_hf_config(one_origin)), weights_of(one_origin)
        state = {
            name: weight_map.from_hf(name, weights.__getitem__).to(torch.float32).to(dtype)
            for name in weight_map.megatron_names()
        }
        release = tmp_path / "td" / "release"
        dcp.save(state, checkpoint_id=release, no_dist=True)
        (release / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        (release.parent / "latest_checkpointed_iteration.txt").write_text("release")
        torch.save({}, release / "common.pt")
        told("inspect", release.parent, code=0)
        words = ["--input-dir", release.parent, "--origin-hf-dir", one_origin, "--output-dir", tmp_path / "out"]
        line = told("torch-dist-to-hf", *words)
        assert "has type" in line and "allowed: bfloat16, float16, float32, float64" in line
        assert not (tmp_path / "out").exists()

    def test_a_tensor_of_four_exabytes(self, tmp_path, one_origin, told):
        """One element, seen 2**62 times."""
        rank = tmp_path / "legacy" / "mp_rank_00"
        rank.mkdir(parents=True)
        state = {"decoder.final_layernorm.weight": torch.zeros(1).expand(2**31, 2**31)}
        torch.save({"args": argparse.Namespace(), "model": state}, rank / "model_optim_rng.pt")
        for words in readers(rank.parent, one_origin, tmp_path / "out"):
            told(*words)


class TestOtherPeoplesFiles:
    @pytest.mark.parametrize("exists", [True, False])
    @pytest.mark.parametrize("absolute", [True, False])
    def test_an_index_tells_nothing_of_them(self, origin, tmp_path, told, exists, absolute):
        """Not even whether they exist, and how large they are."""
        private = tmp_path / "private.safetensors"
        save_file({"model.norm.weight": torch.ones(24)}, private)
        name = str(private) if absolute else "../private.safetensors"
        name = name if exists else name.replace("private", "nothing")
        path = origin / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"]["model.norm.weight"] = name
        path.write_text(json.dumps(index))
        for words in (
            ["inspect", origin, "--json"],
            ["hf-to-torch-dist", "--hf-checkpoint", origin, "--save", tmp_path / "out"],
            ["hf-to-fp8", "--hf-checkpoint", origin, "--save", tmp_path / "out"],
        ):
            assert "outside the checkpoint's directory" in told(*words)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("name", ["/etc/shadow", "/etc/nothing", "../../../../etc/hostname", "../../nothing"])
    def test_metadata_tells_nothing_of_them(self, td, one_origin, tmp_path, told, name):
        path = td / "release" / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        for place in metadata.storage_data.values():
            place.relative_path = name
        path.write_bytes(pickle.dumps(metadata))
        for words in readers(td, one_origin, tmp_path / "out"):
            assert "outside the checkpoint's directory" in told(*words)

    @pytest.mark.parametrize("target", ["/etc/hostname", "../private", "/nothing"])
    def test_a_link_beside_the_weights_is_not_copied(self, origin, one_converted, tmp_path, told, target):
        (tmp_path / "private").write_text("secret")
        (origin / "vocab.json").symlink_to(target)
        words = ["--input-dir", one_converted, "--origin-hf-dir", origin, "--output-dir", tmp_path / "out"]
        assert "vocab.json leads to " in told("torch-dist-to-hf", *words)
        assert not (tmp_path / "out").exists()

    @pytest.mark.timeout(LIMIT_S)
    def test_a_config_that_never_ends(self, origin, tmp_path, told):
        (origin / "config.json").unlink()
        (origin / "config.json").symlink_to("/dev/zero")
        told("hf-to-torch-dist", "--hf-checkpoint", origin, "--save", tmp_path / "out")
        told("inspect", origin)


class TestHubCache:
    """As huggingface_hub lays it out: ``snapshots/REVISION`` is full of links into ``blobs``."""

    @pytest.fixture
    def snapshot(self, one_origin, tmp_path):
        cache = tmp_path / "hub" / "models--some--model"
        snapshot = cache / "snapshots" / "1f2e3d"
        snapshot.mkdir(parents=True)
        (cache / "blobs").mkdir()
        (cache / "refs").mkdir()
        (cache / "refs" / "main").write_text("1f2e3d")
        for number, path in enumerate(sorted(one_origin.iterdir())):
            shutil.copy(path, cache / "blobs" / f"{number:040x}")
            (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number:040x}")
        return snapshot

    def test_it_is_read_like_any_directory(self, snapshot, one_origin, tmp_path):
        hf_to_torch_dist(snapshot, tmp_path / "td")
        torch_dist_to_hf(tmp_path / "td", tmp_path / "back", snapshot)
        assert verify(one_origin, tmp_path / "td").equal
        assert_same_weights(tmp_path / "back", one_origin)
        # And the result has no links.
        assert not [path for path in (tmp_path / "back").iterdir() if path.is_symlink()]
        assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (one_origin / "tokenizer.json").read_bytes()

    def test_through_a_link_to_the_snapshot(self, snapshot, one_origin, tmp_path):
        (tmp_path / "model").symlink_to(snapshot)
        hf_to_torch_dist(tmp_path / "model", tmp_path / "td")
        assert verify(one_origin, tmp_path / "td").equal

    def test_a_link_to_another_models_blobs_is_refused(self, snapshot, tmp_path):
        other = tmp_path / "hub" / "models--other--model" / "blobs"
        other.mkdir(parents=True)
        (other / "0").write_text("{}")
        (snapshot / "config.json").unlink()
        (snapshot / "config.json").symlink_to("../../../models--other--model/blobs/0")
        with pytest.raises(HfConfigError, match="outside the checkpoint's directory"):
            hf_to_torch_dist(snapshot, tmp_path / "td")

    def test_only_a_cache_has_blobs(self, one_origin, tmp_path):
        """A directory of the name ``blobs`` two levels above is nothing special elsewhere."""
        model = shutil.copytree(one_origin, tmp_path / "models" / "mine")
        (tmp_path / "blobs").mkdir()
        (model / "config.json").rename(tmp_path / "blobs" / "0")
        (model / "config.json").symlink_to("../../blobs/0")
        with pytest.raises(HfConfigError, match="outside the checkpoint's directory"):
            hf_to_torch_dist(model, tmp_path / "td")
