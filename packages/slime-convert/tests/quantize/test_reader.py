import json
import math

import pytest
import torch
from safetensors.torch import save_file

from slime_convert.errors import HfConfigError, QuantizationError, WeightError
from slime_convert.hf import HfReader
from slime_convert.quantize.formats import Fp8Format, Int4Format
from slime_convert.quantize.fp8 import dequantize_fp8, quantize_fp8
from slime_convert.quantize.int4 import dequantize_int4, quantize_int4
from slime_convert.quantize.reader import open_unquantized, open_weights

NAME = "model.layers.0.mlp.experts.0.up_proj.weight"
NORM = {"model.norm.weight": torch.ones(64, dtype=torch.float32)}


def fp8_parts():
    torch.manual_seed(0)
    q, scale = quantize_fp8(torch.randn(6, 64).bfloat16(), (4, 48))
    return {NAME: q, f"{NAME}_scale_inv": scale}


def int4_parts(shape_type=torch.int64):
    """The K2 way to store one expert."""
    torch.manual_seed(0)
    packed, scale = quantize_int4(torch.randn(6, 64).bfloat16(), 32)
    shape = torch.tensor([6, 64], dtype=shape_type)
    return {f"{NAME}_packed": packed, f"{NAME}_scale": scale, f"{NAME}_shape": shape}


def model(directory, format_, *files):
    config = {} if format_ is None else {"quantization_config": format_.to_config([])}
    (directory / "config.json").write_text(json.dumps(config))
    for number, tensors in enumerate(files):
        save_file(tensors, directory / f"{number}.safetensors")
    return directory


FP8, INT4 = Fp8Format((4, 48)), Int4Format(32)


def test_fp8(tmp_path):
    """The scales may lie in another file than their weight, as some of DeepSeek-V3's do."""
    parts = fp8_parts()
    weight, scale = ({name: tensor} for name, tensor in parts.items())
    with open_weights(model(tmp_path, FP8, weight | NORM, scale)) as reader:
        assert reader.names == {NAME, "model.norm.weight"} and sorted(reader.names_in_order) == sorted(reader.names)
        assert reader.spec(NAME).shape == (6, 64) and reader.spec(NAME).dtype == reader.dtype(NAME) == torch.bfloat16
        assert reader.dtype("model.norm.weight") == torch.float32
        assert torch.equal(reader.load(NAME), dequantize_fp8(*parts.values(), (4, 48)))
        assert torch.equal(reader.load("model.norm.weight"), NORM["model.norm.weight"])


@pytest.mark.parametrize("shape_type", [torch.int32, torch.int64], ids=str)
def test_int4(tmp_path, shape_type):
    parts = int4_parts(shape_type)
    with open_weights(model(tmp_path, INT4, parts | NORM)) as reader:
        assert reader.names == {NAME, "model.norm.weight"} and sorted(reader.names_in_order) == sorted(reader.names)
        assert reader.spec(NAME).shape == (6, 64) and reader.spec(NAME).dtype == reader.dtype(NAME) == torch.bfloat16
        assert reader.dtype("model.norm.weight") == torch.float32
        packed, scale, _ = parts.values()
        assert torch.equal(reader.load(NAME), dequantize_int4(packed, scale, 64, 32))
        assert torch.equal(reader.load("model.norm.weight"), NORM["model.norm.weight"])


def test_an_unquantized_model_is_read_as_it_is(tmp_path):
    for open_ in (open_weights, open_unquantized):
        with open_(model(tmp_path, None, NORM)) as reader:
            assert type(reader) is HfReader and reader.names == set(NORM)


def without(parts, suffix):
    return {name: tensor for name, tensor in parts.items() if not name.endswith(suffix)}


@pytest.mark.parametrize(
    ("format_", "parts", "error", "told"),
    [
        (FP8, without(fp8_parts(), "_inv"), WeightError, rf"lacks {NAME}_scale_inv and 0 more parts"),
        (
            FP8,
            fp8_parts() | {"a_scale_inv": torch.ones(1)},
            WeightError,
            "has a_scale_inv and 0 more parts that belong",
        ),
        (FP8, NORM, QuantizationError, "has no quantized weights, though its config.json has a quantization_config"),
        (FP8, {name: tensor[None] for name, tensor in fp8_parts().items()}, WeightError, "is FP8 but no matrix"),
        (INT4, without(int4_parts(), "_scale"), WeightError, rf"lacks {NAME}_scale and 0 more"),
        (INT4, without(int4_parts(), "_shape"), WeightError, rf"lacks {NAME}_shape and 0 more"),
        (INT4, without(int4_parts(), "_packed"), QuantizationError, "has no quantized weights"),
        (
            INT4,
            int4_parts() | {f"{NAME}_zero_point": torch.ones(1)},
            WeightError,
            "has .*_zero_point and .*no zero poi",
        ),
        (INT4, int4_parts() | {f"{NAME}_packed": torch.ones(6, 8)}, WeightError, r"torch\.float32 and shape \(6, 8\)"),
        (INT4, int4_parts() | {f"{NAME}_shape": torch.tensor([7, 64])}, WeightError, r"does not fit .* \[7, 64\]"),
        (INT4, int4_parts() | {f"{NAME}_shape": torch.tensor(6)}, WeightError, r"does not fit .*_shape 6; allowed"),
        (INT4, int4_parts() | {f"{NAME}_shape": torch.tensor([6, math.nan])}, WeightError, r"not fit .* \[6\.0, nan\]"),
        (INT4, int4_parts() | {f"{NAME}_shape": torch.tensor([6, -5])}, WeightError, r"does not fit .* \[6, -5\]"),
        (
            INT4,
            int4_parts() | {NAME: torch.ones(6, 64)},
            WeightError,
            rf"has {NAME} both packed and not packed \(1 such",
        ),
        (
            INT4,
            int4_parts() | {"a.experts.up_proj_packed": torch.ones(1)},
            WeightError,
            r"has a\.experts\.up_proj_packed and 0 more parts that belong to no quantized weight",
        ),
    ],
)
def test_damaged_models_are_refused(tmp_path, format_, parts, error, told):
    with pytest.raises(error, match=told):
        open_weights(model(tmp_path, format_, parts))


def test_scales_that_do_not_fit_are_told_with_the_weights_name(tmp_path):
    parts = int4_parts() | {f"{NAME}_shape": torch.tensor([6, 99])}
    with open_weights(model(tmp_path, INT4, parts)) as reader, pytest.raises(WeightError, match=NAME):
        reader.load(NAME)


@pytest.mark.parametrize(
    ("format_", "parts", "told"),
    [
        (FP8, fp8_parts(), "is quantized already; make it bfloat16 with slime-convert fp8-to-bf16 first"),
        (INT4, int4_parts(), "is quantized already; make it bfloat16 with slime-convert int4-to-bf16 first"),
        (None, without(fp8_parts(), "_inv"), rf"has {NAME} of type torch.float8_e4m3fn: it is quantized already"),
        (None, int4_parts(), rf"has {NAME}_packed of type torch.int32: it is quantized already"),
    ],
)
def test_what_is_quantized_already_is_told(tmp_path, format_, parts, told):
    with pytest.raises(QuantizationError, match=told):
        open_unquantized(model(tmp_path, format_, parts))


def test_a_file_that_goes_away_is_told(tmp_path):
    reader = open_weights(model(tmp_path, None, {"a": torch.ones(1)}, {"b": torch.ones(1)}))
    (tmp_path / "0.safetensors").unlink()
    with pytest.raises(HfConfigError, match=r"cannot read .*0\.safetensors"):
        reader.load("a")
