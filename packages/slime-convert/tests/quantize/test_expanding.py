"""The weights of quantized models as they are read, and models whose parts do not fit together."""

import json
import math
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from slime_convert import hf_to_fp8
from slime_convert.errors import QuantizationError, WeightError
from slime_convert.files.tensors import ITEM_BYTES
from slime_convert.formats.hf import open_model
from slime_convert.quantize import Fp8Format, Int4Format, Mxfp4Format
from slime_convert.quantize.numbers import dequantize_fp8, dequantize_int4, quantize_fp8, quantize_int4
from support.family_models import read

NAME = "model.layers.0.mlp.experts.0.up_proj.weight"
FP8, INT4, MXFP4 = Fp8Format((4, 48)), Int4Format(32), Mxfp4Format()
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


EXPERTS = "model.layers.0.mlp.experts.down_proj"


def mxfp4_parts():
    """All bytes, and scales from the smallest to the largest, of two experts."""
    torch.manual_seed(0)
    blocks = torch.stack([torch.randperm(256)[:96], torch.randperm(256)[:96]]).reshape(2, 3, 2, 16)
    scales = torch.tensor([0, 1, 100, 127, 128, 252, 2, 90, 110, 120, 130, 251]).reshape(2, 3, 2)
    return {f"{EXPERTS}_blocks": blocks.to(torch.uint8), f"{EXPERTS}_scales": scales.to(torch.uint8)}


def model(directory, format_, *files):
    config = {}
    if format_ == MXFP4:
        config = {"quantization_config": {"quant_method": "mxfp4"}}
    elif format_ is not None:
        config = {"quantization_config": format_.to_config([])}
    (directory / "config.json").write_text(json.dumps(config))
    for number, tensors in enumerate(files):
        save_file(tensors, directory / f"{number}.safetensors")
    return directory


@pytest.mark.timeout(60)
@pytest.mark.parametrize("format_", [FP8, INT4, MXFP4], ids=["fp8", "int4", "mxfp4"])
def test_a_quantized_model_is_opened_without_torch(tmp_path, format_):
    parts = {FP8: fp8_parts, INT4: int4_parts, MXFP4: mxfp4_parts}[format_]
    opened = f"from slime_convert.formats.hf import open_model; open_model({str(model(tmp_path, format_, parts()))!r})"
    code = f"import sys; {opened}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def assert_reads(reader, weight):
    """Both weights, the first expanded; announced as what they are."""
    read_ = {name: read(reader, name) for name in reader.tensors}
    assert read_.keys() == {NAME, "model.norm.weight"}
    assert torch.equal(read_[NAME], weight) and torch.equal(read_["model.norm.weight"], NORM["model.norm.weight"])
    for name, info in reader.tensors.items():
        assert (info.shape, f"torch.{info.dtype}") == (read_[name].shape, str(read_[name].dtype))
        assert info.nbytes == read_[name].numel() * ITEM_BYTES[info.dtype]


def test_fp8(tmp_path):
    """The scales may lie in another file than their weight, as some of DeepSeek-V3's do."""
    parts = fp8_parts()
    weight, scale = ({name: tensor} for name, tensor in parts.items())
    reader = open_model(model(tmp_path, FP8, weight | NORM, scale))
    assert_reads(reader, dequantize_fp8(*parts.values(), (4, 48)))


@pytest.mark.parametrize("shape_type", [torch.int32, torch.int64], ids=str)
def test_int4(tmp_path, shape_type):
    parts = int4_parts(shape_type)
    packed, scale, _ = parts.values()
    assert_reads(open_model(model(tmp_path, INT4, parts | NORM)), dequantize_int4(packed, scale, 64, 32))


def test_an_unquantized_model_is_read_as_it_is(tmp_path):
    reader = open_model(model(tmp_path, None, NORM))
    assert list(reader.tensors) == list(NORM) and reader.storage is None


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
        (FP8, NORM, QuantizationError, "has no quantized weights, but a quantization_config; fetch"),
        (FP8, {name: tensor[None] for name, tensor in fp8_parts().items()}, WeightError, "is FP8 but not a matrix"),
        (INT4, without(int4_parts(), "_scale"), WeightError, rf"lacks {NAME}_scale and 0 more"),
        (INT4, without(int4_parts(), "_shape"), WeightError, rf"lacks {NAME}_shape and 0 more"),
        (INT4, without(int4_parts(), "_packed"), QuantizationError, "has no quantized weights"),
        (
            INT4,
            int4_parts() | {f"{NAME}_zero_point": torch.ones(1)},
            WeightError,
            "has .*_zero_point and .*no zero poi",
        ),
        (
            INT4,
            int4_parts() | {f"{NAME}_packed": torch.ones(6, 8)},
            WeightError,
            r"has type float32 and shape \(6, 8\)",
        ),
        (INT4, int4_parts() | {f"{NAME}_shape": torch.tensor([7, 64])}, WeightError, r"does not fit .* \[7, 64\]"),
        (INT4, int4_parts() | {f"{NAME}_shape": torch.tensor(6)}, WeightError, r"does not fit .*_shape \[\]; allowed"),
        (
            INT4,
            int4_parts() | {f"{NAME}_shape": torch.tensor([6, math.nan])},
            WeightError,
            r"not fit .*_shape \[\]; allowed",
        ),
        (INT4, int4_parts() | {f"{NAME}_shape": torch.tensor([6, -5])}, WeightError, r"does not fit .* \[6, -5\]"),
        (
            INT4,
            int4_parts() | {NAME: torch.ones(6, 64)},
            WeightError,
            rf"has {NAME} both quantized and not \(1 such",
        ),
        (
            INT4,
            int4_parts() | {"a.experts.up_proj_packed": torch.ones(1)},
            WeightError,
            r"lacks a\.experts\.up_proj_scale and 1 more parts of quantized weights",
        ),
    ],
)
def test_damaged_models_are_refused(tmp_path, format_, parts, error, told):
    with pytest.raises(error, match=told):
        open_model(model(tmp_path, format_, parts))


def test_scales_that_do_not_fit_are_told_with_the_weights_name(tmp_path):
    parts = int4_parts() | {f"{NAME}_scale": torch.ones(6, 9)}
    reader = open_model(model(tmp_path, INT4, parts))
    with pytest.raises(
        WeightError, match=rf"{NAME} .* scales of shape \(6, 9\); 64 .* of 32 need shapes \(6, 8\) and \(6, 2\)"
    ):
        read(reader, NAME)


@pytest.mark.parametrize(
    ("format_", "parts", "told"),
    [
        (FP8, fp8_parts(), r"is quantized already \(fp8, .*\); use slime-convert fp8-to-bf16 first"),
        (INT4, int4_parts(), r"is quantized already \(compressed-tensors, .*\); use slime-convert int4-to-bf16 first"),
        (None, without(fp8_parts(), "_inv"), rf"has {NAME} of type float8_e4m3fn: it is quantized already"),
        (None, int4_parts(), rf"has {NAME}_packed of type int32: it is quantized already"),
        (None, mxfp4_parts(), rf"has {EXPERTS}_blocks of type uint8: it is quantized already"),
    ],
)
def test_what_is_quantized_already_is_told(tmp_path, format_, parts, told):
    origin = tmp_path / "hf"
    origin.mkdir()
    with pytest.raises(QuantizationError, match=told):
        hf_to_fp8(model(origin, format_, parts), tmp_path / "out" / "fp8")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_size_that_is_only_claimed_takes_no_memory(tmp_path):
    """A few bytes that claim a matrix of 2^40 elements, of each format."""
    huge = int4_parts() | {f"{NAME}_shape": torch.tensor([6, 2**37])}
    with pytest.raises(WeightError, match=r"\(8,\) words in a row, and 137438953472 columns need 17179869184"):
        open_model(model(tmp_path, INT4, huge))


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path):
    """Every pair of elements with every scale that bfloat16 has room for."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    parts = mxfp4_parts()
    reader = open_model(model(tmp_path, MXFP4, parts | NORM))
    ours = read(reader, EXPERTS)
    assert torch.equal(ours, convert_moe_packed_tensors(*parts.values()))
    assert reader.tensors[EXPERTS].shape == ours.shape and reader.tensors.keys() == {EXPERTS, *NORM}
    value = float(ours[1, 33, 2])  # an element by hand: OCP's E2M1, the low half of a byte first
    code, scale = int(parts[f"{EXPERTS}_blocks"][1, 2, 1, 0]) >> 4, int(parts[f"{EXPERTS}_scales"][1, 2, 1])
    sign, exponent, fraction = code >> 3, code >> 1 & 3, code & 1
    size = (1 + fraction / 2) * 2 ** (exponent - 1) if exponent else fraction / 2
    assert value == math.ldexp(-size if sign else size, scale - 127)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"_scales": torch.full((2, 3, 2), 253, dtype=torch.uint8)}, r"scale of 2\^126, for which bfloat16 has no"),
        ({"_scales": torch.ones(2, 3, 1, dtype=torch.uint8)}, r"shape \(2, 3, 2, 16\), its scales uint8 \(2, 3, 1\)"),
        ({"_blocks": torch.ones(2, 3, 2, 16)}, "has type float32 and shape"),
        ({"_scales": None}, f"lacks {re.escape('model.layers.0.mlp.experts.down_proj')}_scales and 0 more"),
    ],
)
def test_damaged_mxfp4(tmp_path, change, told):
    changed = mxfp4_parts() | {EXPERTS + key: value for key, value in change.items()}
    parts = {name: tensor for name, tensor in changed.items() if tensor is not None}
    with pytest.raises(WeightError, match=told):
        read(open_model(model(tmp_path, MXFP4, parts)), EXPERTS)
