import json
import math
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from slime_convert import ModelShape, hf_to_torch_dist
from slime_convert.errors import CheckpointError, HfConfigError
from slime_convert.files.tensors import TensorInfo, tensor_info
from slime_convert.inspection import Contents, inspect_checkpoint
from slime_convert.progress import shape_text, size_text


def test_a_hugging_face_directory(origin):
    """Counted by transformers."""
    contents = inspect_checkpoint(origin)
    model = AutoModelForCausalLM.from_pretrained(origin)
    stored = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}  # a tied one once
    count = sum(stored.values())
    told = contents.to_json()
    assert (told["format"], told["parameters"], told["iteration"]) == ("hf", count, None)
    # Routers keep a bias in fp32 next to the weights.
    assert {"bfloat16"} <= told["dtypes"].keys() <= {"bfloat16", "float32"}
    assert sum(part["elements"] for part in told["dtypes"].values()) == count
    assert sum(part["tensors"] for part in told["dtypes"].values()) == len(contents.tensors)
    assert (contents.shape, contents.family) == (ModelShape.from_hf_config(origin), model.config.model_type)
    assert contents.files == {path.name: path.stat().st_size for path in origin.glob("*.safetensors")}
    assert (told["optimizer"], told["quantization"]) == (None, None)
    sizes = {tensor.name: tensor.nbytes for tensor in contents.tensors}
    assert [tensor["nbytes"] for tensor in told["largest"]] == sorted(sizes.values(), reverse=True)[:5]
    assert f"num_layers {contents.shape.num_layers}, hidden_size 24" in contents.to_text()


def test_a_torch_dist_checkpoint_holds_the_same(origin, converted):
    theirs, contents = inspect_checkpoint(origin), inspect_checkpoint(converted)
    assert contents == inspect_checkpoint(converted / "release")
    assert contents.num_parameters == theirs.num_parameters and contents.family == theirs.family
    assert (contents.format, contents.iteration, contents.iterations) == ("torch_dist", "release", ("release",))
    assert contents.directory == converted / "release" and set(contents.files) == {"__0_0.distcp"}
    assert contents.arguments["num_layers"] == theirs.shape.num_layers
    told = json.loads(json.dumps(contents.to_json()))
    assert (told["family"], told["arguments"]["padded_vocab_size"]) == (theirs.family, 128)
    assert f"{theirs.family}, num_layers {theirs.shape.num_layers}, hidden_size 24" in contents.to_text()


def test_what_lies_there_twice_is_counted_once(with_prediction_module, origin_of, tmp_path):
    """Norms under two names, what a prediction module repeats, a tied output layer."""
    hf_to_torch_dist(with_prediction_module, tmp_path / "td")
    tensors = {t.name: t.num_elements for t in inspect_checkpoint(with_prediction_module).tensors}
    repeated = ["model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"]
    count = sum(tensors.values()) - sum(map(tensors.__getitem__, repeated))
    contents = inspect_checkpoint(tmp_path / "td")
    assert inspect_checkpoint(with_prediction_module).num_parameters == contents.num_parameters == count
    # Two norms of each layer's latents; of the dense layer the MLP's too.
    assert sum(t.num_elements for t in contents.tensors if t.name in contents.repeated) == 4 * (14 + 10) + 24

    tied = origin_of("qwen3-tied")
    count = inspect_checkpoint(tied).num_parameters
    (tied / "model.safetensors.index.json").unlink()
    save_file({"lm_head.weight": torch.zeros(101, 24)}, tied / "head.safetensors")
    assert inspect_checkpoint(tied).num_parameters == count
    (tied / "config.json").write_text("{}")
    assert inspect_checkpoint(tied).num_parameters == count + 101 * 24


def test_optimizer_state_and_other_iterations(origin, converted):
    path = converted / "iter_0000005"
    dcp.save({"a": torch.ones(2), "optimizer.state.exp_avg.a": torch.ones(7)}, checkpoint_id=path, no_dist=True)
    shutil.copy(converted / "release" / "metadata.json", path)
    torch.save({"iteration": 5}, path / "common.pt")
    (converted / "latest_checkpointed_iteration.txt").write_text("5")
    contents = inspect_checkpoint(converted)
    assert (contents.iteration, contents.num_parameters) == ("iter_0000005", 2)
    assert contents.to_json()["optimizer"] == {"tensors": 1, "elements": 7, "bytes": 28}
    text = contents.to_text()
    assert "iter_0000005 (others: release)" in text and "1 tensor, 7 elements, 28 bytes" in text
    assert "model         unknown" in text
    moved = converted.parent / "elsewhere"
    shutil.move(path, moved)
    assert inspect_checkpoint(moved).iteration == "5"


@pytest.fixture
def quantized(tmp_path):
    def write(settings, **tensors):
        save_file(tensors, tmp_path / "model.safetensors")
        config = {"model_type": "deepseek_v3", "quantization_config": settings}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return inspect_checkpoint(tmp_path)

    return write


def test_fp8(quantized):
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    weight = torch.zeros(256, 128, dtype=torch.float8_e4m3fn)
    contents = quantized(settings, **{"a.weight": weight, "a.weight_scale_inv": torch.ones(2, 1)})
    assert contents.quantization == "fp8, fmt e4m3, weight_block_size [128, 128]"
    assert (contents.num_parameters, contents.family, contents.shape) == (256 * 128, "deepseek_v3", None)
    assert list(contents.to_json()["dtypes"]) == ["float8_e4m3fn", "float32"]  # the type with most bytes first


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_integers_are_counted_one_by_one(quantized, bits):
    weights = {"num_bits": bits, "group_size": 32}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights}},
    }
    contents = quantized(
        settings,
        **{
            "a.weight_packed": torch.zeros(64, 96 * bits // 32, dtype=torch.int32),
            "a.weight_scale": torch.ones(64, 3),
            "a.weight_shape": torch.tensor([64, 96]),
            "a.weight_zero_point": torch.zeros(64, 3, dtype=torch.int8),
            "a.weight_g_idx": torch.zeros(96, dtype=torch.int32),
            "a.input_scale": torch.ones(1),
        },
    )
    assert contents.num_parameters == 64 * 96
    assert contents.quantization == f"compressed-tensors, format pack-quantized, num_bits {bits}, group_size 32"


@pytest.mark.parametrize(
    "config", ['{"quantization_config": 3, "model_type": 4}', '{"quantization_config": {"config_groups": []}}']
)
def test_a_strange_config_is_no_reason_to_fail(one_origin, tmp_path, config):
    shutil.copytree(one_origin, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(config)
    assert inspect_checkpoint(tmp_path / "model").shape is None


def test_what_is_no_checkpoint_is_told(one_origin, tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no .*/none; give a checkpoint: torch .*; hf .*; gguf"):
        inspect_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"is not a checkpoint of a known format; give one of these: torch "):
        inspect_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(HfConfigError, match=r"has no \*\.safetensors"):
        inspect_checkpoint(tmp_path)
    shutil.copy(next(one_origin.glob("*.safetensors")), tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(HfConfigError, match=r"holds a JSON list, not an object"):
        inspect_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(HfConfigError, match=r"config\.json is not valid JSON"):
        inspect_checkpoint(tmp_path)


def test_sizes_and_shapes_as_text():
    sizes = [size_text(n) for n in (0, 1023, 1024, 3 * 2**20 // 2, 2**40, 2**51)]
    assert sizes == ["0 bytes", "1023 bytes", "1.0 KiB", "1.5 MiB", "1.0 TiB", "2048.0 TiB"]
    assert [shape_text(s) for s in ((), (3,), (3, 4))] == ["scalar", "3", "3×4"]


def test_an_empty_checkpoint_is_a_table_too(tmp_path):
    contents = Contents(format="hf", directory=tmp_path, files={}, tensors=())
    assert "parameters    0" in contents.to_text()


def test_what_no_terminal_and_no_json_can_hold_is_escaped(tmp_path):
    """A file may name a weight with commands for the terminal, half a character, or a line of its own."""
    name = "a\x1b[2J\ud800\n×"
    contents = Contents(
        format="torch_dist",
        directory=tmp_path,
        files={},
        tensors=(TensorInfo(name, "float32", (8, 3), 96),),
        arguments={"a": math.inf, "b": [math.nan, 1.5, "x"], "c": 2},
    )
    assert contents.to_text().splitlines()[-1].startswith(r"a\x1b[2J\ud800\n×")
    told = json.loads(json.dumps(contents.to_json(), allow_nan=False))
    assert told["arguments"] == {"a": "inf", "b": ["nan", 1.5, "x"], "c": 2} and told["largest"][0]["name"] == name


@pytest.mark.parametrize("shape", [(-1,), (2, -3), (2**31, 2**31)])
def test_shapes_that_no_tensor_has_are_refused(shape):
    with pytest.raises(ValueError, match="x has shape"):
        tensor_info("x", "float32", shape)


def test_padding_is_no_parameter(tmp_path):
    tensors = tuple(TensorInfo(name, "float32", (8, 3), 96) for name in ("output_layer.weight", "other.weight"))
    for args, count in (({"vocab_size": 5}, 15 + 24), ({"vocab_size": 9}, 48), ({}, 48)):
        contents = Contents(format="torch_dist", directory=tmp_path, files={}, tensors=tensors, arguments=args)
        assert contents.num_parameters == count
    scalar = (TensorInfo("output_layer.weight", "float32", (), 4),)
    contents = Contents(format="torch_dist", directory=tmp_path, files={}, tensors=scalar, arguments={"vocab_size": 5})
    assert contents.num_parameters == 1
