"""Newer weights take the form of a quantized model."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_convert import hf_to_fp8, hf_to_int4
from slime_convert.errors import QuantizationError, WeightError
from slime_convert.quantize.numbers import dequantize_fp8, dequantize_int4
from slime_convert.stored_form import StoredForm
from support.family_models import weights_of

NAME = "model.layers.0.self_attn.q_proj.weight"


def edit_config(directory, **changes):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_is_within_half_a_step_of_the_weight(made, tmp_path, dtype):
    hf_to_fp8(made("qwen3-tied"), tmp_path / "fp8")
    form = StoredForm(tmp_path / "fp8")
    weight = torch.randn(130, 200).to(dtype)
    (name, q), (scale_name, scale) = form.tensors(NAME, weight)
    assert (name, scale_name) == (NAME, NAME + "_scale_inv")
    assert (q.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    found = dequantize_fp8(q, scale, dtype=torch.float32)
    # 3 fraction bits: half a step is 2^-4 of a number; below 2^-6 of the scale, steps are 2^-9 of it.
    smallest = scale.max() * 2.0**-10
    assert ((found - weight.float()).abs() <= weight.float().abs() * 2.0**-4 + smallest).all()


def test_scales_that_are_stored_in_bfloat16_divide_as_they_are_stored(made, tmp_path):
    hf_to_fp8(made("qwen3-tied"), tmp_path / "fp8")
    [path] = (tmp_path / "fp8").glob("*.safetensors")
    tensors = {k: v.bfloat16() if k.endswith("_scale_inv") else v for k, v in load_file(path).items()}
    save_file(tensors, path)
    weight = torch.randn(256, 256)
    (_, q), (_, scale) = StoredForm(tmp_path / "fp8").tensors(NAME, weight)
    assert scale.dtype == torch.bfloat16
    blocks = weight.view(2, 128, 2, 128)
    exact = blocks.abs().amax((1, 3)) / 448
    assert torch.equal(scale, exact.bfloat16())
    expected = (blocks / exact.bfloat16().float()[:, None, :, None]).to(torch.float8_e4m3fn).view(256, 256)
    assert torch.equal(q.float(), expected.float())


def test_int4_takes_the_type_of_the_stored_scales(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    save_file({NAME: torch.ones(48, 64, dtype=torch.bfloat16)}, tmp_path / "hf" / "model.safetensors")
    hf_to_int4(tmp_path / "hf", tmp_path / "int4")
    form, stored = StoredForm(tmp_path / "int4"), weights_of(tmp_path / "int4")
    weight = torch.randn(stored[NAME + "_shape"].tolist())
    parts = dict(form.tensors(NAME, weight))
    assert parts.keys() == {NAME + "_packed", NAME + "_scale", NAME + "_shape"}
    for name, tensor in parts.items():
        assert (tensor.dtype, tensor.shape) == (stored[name].dtype, stored[name].shape)
    assert parts[NAME + "_shape"].tolist() == list(weight.shape)
    scale = parts[NAME + "_scale"].float().repeat_interleave(32, 1)
    found = dequantize_int4(parts[NAME + "_packed"], parts[NAME + "_scale"], weight.shape[1], 32, torch.float32)
    assert ((found - weight).abs() <= scale * 0.55).all()  # half a step; bfloat16 rounds scale and weight


def test_others_take_their_stored_type_and_unknown_ones_stay(made, tmp_path):
    hf_to_fp8(made("qwen3-tied"), tmp_path / "fp8")
    form = StoredForm(tmp_path / "fp8")
    norm = "model.norm.weight"
    [(name, tensor)] = form.tensors(norm, torch.ones(8, dtype=torch.float32))
    assert (name, tensor.dtype) == (norm, weights_of(tmp_path / "fp8")[norm].dtype)
    weight = torch.ones(2)
    assert form.tensors("score.weight", weight) == [("score.weight", weight)]
    with pytest.raises(WeightError, match="holds a NaN"):
        form.tensors(NAME, torch.full((128, 128), torch.nan))


def test_what_is_only_read_is_refused(made, tmp_path):
    with pytest.raises(QuantizationError, match="is stored as plain numbers; newer weights can be quantized as fp8"):
        StoredForm(made("qwen3-tied"))
    hf_to_fp8(made("qwen3-tied"), tmp_path / "fp8")
    edit_config(tmp_path / "fp8", scale_fmt="ue8m0")
    with pytest.raises(QuantizationError, match=r"scale_fmt 'ue8m0'; .*slime-convert hf-to-fp8"):
        StoredForm(tmp_path / "fp8")
    edit_config(tmp_path / "fp8", quant_method="mxfp4")
    with pytest.raises(QuantizationError, match="is stored as mxfp4"):
        StoredForm(tmp_path / "fp8")
