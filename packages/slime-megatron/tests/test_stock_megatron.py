"""A stock Megatron-core model loads a converted checkpoint, gives transformers' logits, and saves one that converts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime_convert import torch_dist_to_hf

LAYOUTS = {"one": {}, "tp2": {"tensor_parallel": 2}, "ep2": {"expert_parallel": 2}}
WITH_EXPERTS = ("qwen3-moe", "glm4-moe-mtp", "glm4-air", "glm4-flash", "deepseek-mtp", "moonlight", "kimi-k2")
# Every family once; the product in the full run.
SHOWN = ["one", "tp2", "ep2"]
CASES = [("qwen2-tied", "one"), pytest.param("qwen2-tied", "tp2", marks=pytest.mark.full)]
CASES += [
    pytest.param(name, layout, marks=[] if SHOWN[number % 3] == layout else [pytest.mark.full])
    for number, name in enumerate(WITH_EXPERTS)
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_stock_megatron_and_back(ranks, tiny_model, tmp_path, name, layout):
    model, split = tiny_model(name), LAYOUTS[layout]
    tokens_BS = torch.randint(0, 500, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected_BSV = model.hf(tokens_BS).logits
    assert expected_BSV.abs().max() > 1
    saved = tmp_path / "iter_0000001"
    saved.mkdir()
    args = (model.shape, str(Path(model.checkpoint) / "release"), tokens_BS.tolist(), str(saved))
    for logits_BSV in ranks.call_apart(max(split.values(), default=1), "stock_logits", *args, **split):
        assert (torch.from_numpy(logits_BSV) - expected_BSV).abs().max() < 1e-4

    torch_dist_to_hf(saved, tmp_path / "hf", model.hf_directory)
    ours, theirs = (load_file(Path(path) / "model.safetensors") for path in (tmp_path / "hf", model.hf_directory))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[weight], theirs[weight]) for weight in theirs)
