"""The commands with ``--bridge``."""

import json
import shutil
import sys

import pytest
import torch
from mbridge.core import VLMBridge
from mbridge.core.bridge import _MODEL_REGISTRY
from safetensors.torch import load_file, save_file

from slime_convert.cli import main
from slime_convert.convert import hf_to_torch_dist
from slime_convert.shape import FAMILIES
from slime_convert.shape.families import BRIDGED_FAMILIES


def weights_of(directory):
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_there_and_back_as_a_user_types_it(origin_of, tmp_path, capsys):
    origin = origin_of("mixtral")
    capsys.readouterr()  # what transformers says when it saves
    words = ["--bridge", "mbridge", "--num-experts", "4", "--swiglu"]
    there = ["hf-to-torch-dist", "--hf-checkpoint", str(origin), "--save", str(tmp_path / "td")]
    assert main([*there, *words]) == 0
    for command, source in (("torch-dist-to-hf", "--input-dir"), ("megatron-to-hf", "--load")):
        back = tmp_path / command
        output = ["--output-dir", str(back), "--origin-hf-dir", str(origin)]
        assert main([command, source, str(tmp_path / "td"), *output, *words]) == 0
        ours, theirs = weights_of(back), weights_of(origin)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert capsys.readouterr().err == ""


def test_verify_cuts_megatrons_weights_as_the_bridge_does(origin_of, tmp_path, capsys):
    origin, td, bridge = origin_of("mixtral"), str(tmp_path / "td"), ["--bridge", "mbridge"]
    hf_to_torch_dist(origin, td, bridge="mbridge")
    weights, name = weights_of(origin), "model.layers.1.self_attn.k_proj.weight"
    weights[name][3, 5] += 1
    save_file(weights, tmp_path / "model.safetensors")
    shutil.copy(origin / "config.json", tmp_path)
    capsys.readouterr()
    assert main(["verify", td, str(tmp_path), *bridge]) == 1
    assert f"{name}  values" in (told := capsys.readouterr().out) and told.count(" of ") == 1
    assert main(["verify", td, td, *bridge, "--origin-hf-dir", str(origin)]) == 0
    assert "60 equal" in capsys.readouterr().out
    assert main(["verify", td, td, *bridge]) == 2
    assert "has a config.json, which a bridge needs" in capsys.readouterr().err
    assert main(["verify", td, str(origin)]) == 2
    assert "mixtral, qwen2_moe with --bridge mbridge" in capsys.readouterr().err
    # The arguments of the checkpoint against the config of the model.
    config = json.loads((origin / "config.json").read_text()) | {"num_experts_per_tok": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["verify", td, str(origin), *bridge, "--origin-hf-dir", str(tmp_path)]) == 0
    assert "moe_router_topk 2 (config: 3)" in capsys.readouterr().out


def test_the_flag_is_obeyed_for_a_known_family(one_origin, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "mbridge", None)
    words = ["hf-to-torch-dist", "--hf-checkpoint", str(one_origin), "--save", str(tmp_path / "td")]
    assert main([*words, "--bridge", "mbridge"]) == 2
    line = capsys.readouterr().err
    assert "pip install 'slime-convert[mbridge]'" in line and line.count("\n") == 1
    assert not (tmp_path / "td").exists()


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_without_it_an_unknown_family_is_told_of_it(one_origin, tmp_path, capsys, family):
    config = json.loads((one_origin / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": family}))
    assert main(["hf-to-torch-dist", "--hf-checkpoint", str(tmp_path), "--save", str(tmp_path / "td")]) == 2
    line = capsys.readouterr().err
    assert f"model_type '{family}'" in line and all(name in line for name in FAMILIES)
    assert "mimo, mixtral, qwen2_moe with --bridge mbridge" in line


def test_the_message_names_what_mbridge_adds():
    known = {family for family, kind in _MODEL_REGISTRY.items() if not issubclass(kind, VLMBridge)}
    assert known - set(FAMILIES) == set(BRIDGED_FAMILIES)


def test_an_unknown_bridge_is_told(capsys):
    with pytest.raises(SystemExit):
        main(["hf-to-torch-dist", "--hf-checkpoint", "x", "--save", "y", "--bridge", "ferry"])
    assert "invalid choice: 'ferry'" in capsys.readouterr().err
