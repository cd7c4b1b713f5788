"""A GGUF file is written here with gguf's own writer, in llama.cpp's conventions, from a transformers model."""

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from slime_convert import ModelShape
from slime_convert.cli import main
from slime_convert.errors import GgufError
from slime_convert.gguf import find_gguf, gguf_to_hf

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=261,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def gguf_file(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "below" / "tiny.gguf"
    path.parent.mkdir()
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(gguf_name(name), for_llama_cpp(name, tensor, config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer):
    """A byte-level vocabulary with one merge, and four special tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>", *bytes_to_unicode().values(), "26"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * 257)
    writer.add_token_merges(["2 6"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(3)
    writer.add_chat_template(TEMPLATE)


def gguf_name(name):
    for theirs, short in NAMES.items():
        name = name.replace(theirs, short)
    return name.replace("model.layers.", "blk.")


def for_llama_cpp(name, tensor, config):
    """llama.cpp rotates neighbouring channels, transformers the two halves of a head."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    halves = tensor.reshape(heads, 2, -1, tensor.shape[1])
    return halves.swapaxes(1, 2).reshape(tensor.shape).contiguous()


def test_weights_config_tokenizer_and_template_arrive(model, gguf_file, tmp_path):
    gguf_to_hf(gguf_file.parents[1], tmp_path / "hf")
    written = load_file(tmp_path / "hf" / "model.safetensors")
    theirs = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert written.keys() == theirs.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in theirs.items())
    assert ModelShape.from_hf_config(tmp_path / "hf") == ModelShape.from_hf_config(model.config.to_dict())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer("57 + 26 =", add_special_tokens=False)["input_ids"]
    assert len(ids) == 8 and tokenizer.decode(ids) == "57 + 26 ="
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.chat_template == TEMPLATE


def test_type_of_the_weights(gguf_file, tmp_path, capfd):
    assert main(["gguf-to-hf", "--gguf", str(gguf_file), "--save", str(tmp_path / "hf"), "--dtype", "bfloat16"]) == 0
    assert {t.dtype for t in load_file(tmp_path / "hf" / "model.safetensors").values()} == {torch.bfloat16}
    assert capfd.readouterr().err == ""


def test_no_or_several_files_are_refused(tmp_path):
    with pytest.raises(GgufError, match="there is no file or directory"):
        find_gguf(tmp_path / "none")
    with pytest.raises(GgufError, match=r"holds 0 \.gguf files; give"):
        find_gguf(tmp_path)
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(GgufError, match=r"holds 2 \.gguf files: a\.gguf b\.gguf; give"):
        find_gguf(tmp_path)


def test_a_damaged_file_is_refused_and_leaves_nothing(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(GgufError, match=r"cannot read .*a\.gguf"):
        gguf_to_hf(tmp_path, tmp_path / "out" / "hf")
    assert not any((tmp_path / "out").iterdir())
