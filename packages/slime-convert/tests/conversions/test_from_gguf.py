"""GGUF files with tokenizer and template arrive as Hugging Face directories; what would be lost is refused."""

import io
import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3Config

from slime_convert import ModelShape, gguf_to_hf, verify
from slime_convert.cli import main
from slime_convert.errors import CheckpointError, GgufError, OutputError, UnsupportedModelError
from slime_convert.inspection import inspect_checkpoint
from support.gguf_files import SIZES, TEMPLATE, tensors_of, write_gguf


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES) if request.param == "llama" else Qwen3Config(**SIZES, head_dim=128)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.fixture(scope="module")
def gguf_file(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "below" / "tiny.gguf"
    path.parent.mkdir()
    write_gguf(path, model.config, tensors_of(model))
    return path


def test_weights_config_tokenizer_and_template_arrive(model, gguf_file, tmp_path):
    gguf_to_hf(gguf_file.parent, tmp_path / "hf")
    written = load_file(tmp_path / "hf" / "model.safetensors")
    theirs = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert written.keys() == theirs.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in theirs.items())
    assert verify(gguf_file, tmp_path / "hf").equal
    assert inspect_checkpoint(gguf_file).shape == ModelShape.from_hf_config(tmp_path / "hf")
    assert ModelShape.from_hf_config(tmp_path / "hf") == ModelShape.from_hf_config(model.config.to_dict())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer("57 + 26 =", add_special_tokens=False)["input_ids"]
    assert len(ids) == 8 and tokenizer.decode(ids) == "57 + 26 ="
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.chat_template == TEMPLATE


def test_files_next_to_it_are_not_read(gguf_file, tmp_path, monkeypatch):
    """They could name code that transformers runs, once it has asked on the terminal."""
    where, ran = tmp_path / "model", tmp_path / "ran"
    where.mkdir()
    (where / "t.gguf").write_bytes(gguf_file.read_bytes())
    (where / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass T: pass\n")
    code = {"auto_map": {"AutoTokenizer": ["evil.T", None]}, "tokenizer_class": "T", "chat_template": "another"}
    (tmp_path / "elsewhere.json").write_text(json.dumps(code))
    (where / "tokenizer_config.json").symlink_to(tmp_path / "elsewhere.json")
    (where / "adapter_config.json").write_text("no JSON")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    monkeypatch.chdir(where)
    for number, one in enumerate([gguf_file, "t.gguf"]):
        gguf_to_hf(one, tmp_path / f"hf{number}")
    assert not ran.exists()
    written, theirs = ({path.name: path.read_bytes() for path in (tmp_path / hf).iterdir()} for hf in ("hf1", "hf0"))
    assert written == theirs and TEMPLATE.encode() in written["chat_template.jinja"]


def test_type_of_the_weights(gguf_file, tmp_path, capfd):
    assert main(["gguf-to-hf", "--gguf", str(gguf_file), "--save", str(tmp_path / "hf"), "--dtype", "bfloat16"]) == 0
    assert {t.dtype for t in load_file(tmp_path / "hf" / "model.safetensors").values()} == {torch.bfloat16}
    assert capfd.readouterr().err == ""


def test_no_or_several_files_are_refused(tmp_path):
    def convert(path):
        gguf_to_hf(path, tmp_path / "out" / "hf")

    with pytest.raises(
        CheckpointError, match=r"there is no .*/none; give a checkpoint: gguf \(a \.gguf file, or a dir"
    ):
        convert(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"is not a checkpoint of a known format; give one of these: gguf"):
        convert(tmp_path)
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(GgufError, match=r"holds 2 \.gguf files: a\.gguf b\.gguf; give one"):
        convert(tmp_path)


def test_a_file_that_would_be_read_in_part_is_refused(model, tmp_path):
    """Transformers makes up weights that are missing, and says nothing of those that it has no place for."""
    whole, norm = tensors_of(model), "blk.1.ffn_norm.weight"
    for number, (tensors, words) in enumerate(
        [
            ({name: tensor for name, tensor in whole.items() if name != norm}, rf"it lacks {norm}"),
            (whole | {"rope_freqs.weight": torch.ones(4)}, r"it has a scaled rotary embedding, which would be lost"),
            (whole | {"blk.0.attn_q.bias": torch.ones(32)}, r"it has blk\.0\.attn_q\.bias, which would be lost"),
        ]
    ):
        path = tmp_path / f"{number}.gguf"
        write_gguf(path, model.config, tensors)
        with pytest.raises(GgufError, match=words):
            gguf_to_hf(path, tmp_path / "out" / "hf")
    scaled = tmp_path / "scaled.gguf"
    write_gguf(scaled, model.config, whole, **{f"{model.config.model_type}_rope_scaling_type": "linear"})
    with pytest.raises(GgufError, match=r"it has \w+\.rope\.scaling\.type 'linear', which would be lost"):
        gguf_to_hf(scaled, tmp_path / "out" / "hf")
    assert not (tmp_path / "out").exists()


def test_another_family_is_refused(model, tmp_path):
    write_gguf(tmp_path / "a.gguf", model.config, tensors_of(model), architecture="qwen2")
    with pytest.raises(UnsupportedModelError, match=r"holds a qwen2 model; GGUF files are read of llama, qwen3;"):
        gguf_to_hf(tmp_path, tmp_path / "out" / "hf")
    assert not (tmp_path / "out").exists()


def test_sizes_that_transformers_does_not_read_are_refused(tmp_path):
    """It takes 128 channels for every Qwen3 head, whatever the file says."""
    narrow = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, head_dim=16), dtype=torch.float32)
    write_gguf(tmp_path / "a.gguf", narrow.config, tensors_of(narrow))
    with pytest.raises(GgufError, match=r"weights of other sizes .*q_proj\.weight.*\[64, 32\].*\[512, 32\]"):
        gguf_to_hf(tmp_path, tmp_path / "out" / "hf")
    assert not (tmp_path / "out").exists()


def test_a_cut_off_file_is_refused(gguf_file, tmp_path):
    """An interrupted download, wherever it stopped."""
    data = gguf_file.read_bytes()
    for length in range(5, len(data) - 1, len(data) // 12):
        (tmp_path / "a.gguf").write_bytes(data[:length])
        with pytest.raises(
            GgufError, match=r"a\.gguf.*(give a GGUF file that is complete|is cut off: it has \d+ of \d+ bytes)"
        ):
            gguf_to_hf(tmp_path, tmp_path / "out" / "hf")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_told_and_what_is_written_stays(gguf_file, tmp_path, full_disk):
    with full_disk(5000), pytest.raises(OutputError, match=r"cannot write .*/hf .*File too large.*again to continue"):
        gguf_to_hf(gguf_file, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == [".hf.partial"]
    calls = []
    gguf_to_hf(gguf_file, tmp_path / "hf", on_progress=lambda *call: calls.append(call))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert calls == sorted(calls) and calls[-1][0] == calls[-1][1] > 0


def test_a_disk_that_is_full_when_the_tokenizer_is_written_is_told(gguf_file, tmp_path, full_disk, monkeypatch):
    """By a library that has no type of its own for it."""

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("slime_convert.conversions.from_gguf._save_settings", interrupt)
        with pytest.raises(KeyboardInterrupt):
            gguf_to_hf(gguf_file, tmp_path / "hf")
    with (
        full_disk(2000),
        pytest.raises(OutputError, match=r"cannot write .*/hf \(File too large \(os error 27\)\).*again to continue"),
    ):
        gguf_to_hf(gguf_file, tmp_path / "hf")
    gguf_to_hf(gguf_file, tmp_path / "hf")
    assert (tmp_path / "hf" / "tokenizer.json").stat().st_size > 2000


@pytest.mark.parametrize("k", [12, 18])
def test_killed_it_continues(gguf_file, tmp_path, killed_at, bytes_written, k):
    def convert(out, **kwargs):
        gguf_to_hf(gguf_file, out, max_shard_bytes=20_000, **kwargs)

    num_bytes, calls = bytes_written(lambda: convert(tmp_path / "whole")), []
    killed_at(lambda: convert(tmp_path / "out"), num_bytes * k // 20)
    assert not (tmp_path / "out").exists()
    convert(tmp_path / "out", on_progress=lambda *call: calls.append(call))
    assert 0 < calls[0][0] <= num_bytes * k // 20 and calls == sorted(calls)
    one, other = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("whole", "out"))
    assert one == other and "config.json" in one


def test_an_unknown_type_is_refused(gguf_file, tmp_path):
    with pytest.raises(GgufError, match="dtype 'int8' is unknown; allowed: float32, bfloat16, float16"):
        gguf_to_hf(gguf_file, tmp_path / "hf", dtype="int8")


def test_a_damaged_file_is_refused_and_leaves_nothing(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(GgufError, match=r"cannot read .*a\.gguf"):
        gguf_to_hf(tmp_path, tmp_path / "out" / "hf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("value", "dtype"), [(1e5, "float16"), (math.nan, "float32"), (math.inf, "bfloat16")])
def test_what_a_type_has_no_room_for_is_told(model, tmp_path, value, dtype):
    """Rounded to float16, 100000 is infinite: the model would say nothing sensible, and nobody would know why."""
    tensors = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    tensors["blk.1.ffn_down.weight"][0, 0] = value
    write_gguf(tmp_path / "large.gguf", model.config, tensors)
    told = r"layers\.1\.mlp\.down_proj\.weight of .*large\.gguf holds .* has no room for; .* dtype= float32"
    with pytest.raises(GgufError, match=told):
        gguf_to_hf(tmp_path / "large.gguf", tmp_path / "hf", dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["large.gguf"]
