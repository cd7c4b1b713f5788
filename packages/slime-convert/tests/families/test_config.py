"""Values of a ``config.json`` are checked as they are read, and count as in transformers where they are left out."""

import json
import math

import pytest
from transformers import (
    DeepseekV3Config,
    DeepseekV32Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from slime_convert import ModelShape
from slime_convert.errors import HfConfigError, UnsupportedModelError
from slime_convert.families.config import HfConfig, expert_fields, layer_freq


def config(_defaults=None, **values):
    return HfConfig(values, "config.json", _defaults)


@pytest.mark.parametrize(
    ("read", "given", "value"),
    [
        (HfConfig.integer, 7, 7),
        (HfConfig.integer, -7, -7),
        (HfConfig.integer, 2**48, 2**48),
        (HfConfig.number, 7, 7.0),
        (HfConfig.number, 0.5, 0.5),
        (HfConfig.switch, True, True),
        (HfConfig.switch, False, False),
        (HfConfig.nullable, 3, 3),
        (HfConfig.get, {"any": "thing"}, {"any": "thing"}),
    ],
)
def test_what_has_the_right_type_is_read(read, given, value):
    found = read(config(key=given), "key")
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("read", "given", "words"),
    [
        # Python takes these for one another; in JSON they are different things.
        (HfConfig.integer, True, "key is true in config.json; it must be an integer"),
        (HfConfig.integer, 7.0, "key is 7.0 in config.json; it must be an integer"),
        (HfConfig.number, False, "key is false in config.json; it must be a number"),
        (HfConfig.switch, 1, "key is 1 in config.json; it must be true or false"),
        (HfConfig.integer, "7", 'key is "7" in config.json; it must be an integer'),
        (HfConfig.number, "7", 'key is "7" in config.json; it must be a number'),
        (HfConfig.switch, "false", 'key is "false" in config.json; it must be true or false'),
        (HfConfig.integer, [7], r"key is \[7\] in config.json; it must be an integer"),
        (HfConfig.nullable, "7", 'key is "7" in config.json; it must be an integer'),
        (HfConfig.integer, 2**48 + 1, "key of config.json is larger than 281474976710656"),
        (HfConfig.integer, -(2**48) - 1, "key of config.json is larger than 281474976710656"),
        (HfConfig.number, 10**400, "key of config.json is larger than any number"),
    ],
)
def test_other_values_are_refused(read, given, words):
    with pytest.raises(HfConfigError, match=f"{words}.*; use the model's original config"):
        read(config(key=given), "key")


@pytest.mark.parametrize("read", [HfConfig.integer, HfConfig.number, HfConfig.switch])
@pytest.mark.parametrize("values", [{}, {"key": None}])
def test_null_counts_as_left_out(read, values):
    """The config's own default comes before the caller's, which may be no value at all."""
    right = {HfConfig.integer: (2, 3), HfConfig.number: (2.5, 3.5), HfConfig.switch: (True, False)}[read]
    familys, callers = right
    assert read(config({"key": familys}, **values), "key", callers) == familys
    assert read(config(**values), "key", callers) == callers
    if read is not HfConfig.switch:
        with pytest.raises(HfConfigError, match=r"key is null in config\.json"):
            read(config(**values), "key")


def test_null_that_says_something_else_than_leaving_it_out():
    assert config({"key": 4}).nullable("key") == 4
    assert config({"key": 4}, key=None).nullable("key") is None
    assert config({"key": 4}, key=0).nullable("key") == 0
    assert config().nullable("key") is None


@pytest.mark.parametrize(
    ("given", "type_", "found"),
    [(["a", "b"], str, ["a", "b"]), ([1, 2], int, [1, 2]), ([], int, []), ((1, 2), int, [1, 2]), (None, str, None)],
)
def test_lists(given, type_, found):
    assert config(key=given).list_of(type_, "key") == found


@pytest.mark.parametrize(
    ("given", "type_", "kind"),
    [([1], str, "texts"), (["a", 1], str, "texts"), ([True], int, "integers"), ("ab", str, "texts"), (2, int, "int")],
)
def test_lists_of_other_things(given, type_, kind):
    with pytest.raises(HfConfigError, match=f"it must be a list of {kind}"):
        config(key=given).list_of(type_, "key")


def test_a_value_of_any_length_makes_a_short_message():
    for value, shown in [(["x" * 10**6], "…"), (10**5000, "a very large number"), ("\x1b[2J", r"\u001b[2J")]:
        with pytest.raises(HfConfigError) as caught:
            config(key=value).switch("key")
        assert shown in str(caught.value) and len(str(caught.value)) < 400


class TestNeed:
    def test_allowed_values_pass(self):
        config(key="a").need("key", "b", "a")
        config(key=None).need("key", None, False)
        config().need("key", None)
        config({"key": "a"}).need("key", "a")

    @pytest.mark.parametrize(
        ("values", "allowed", "words"),
        [
            ({"key": "c"}, ("a", "b"), 'key "c" of config.json is not supported; allowed: "a", "b"; convert another'),
            ({}, ("a",), 'key null of config.json is not supported; allowed: "a"'),
            ({"key": 2}, (None,), "key 2 of config.json is not supported; allowed: none"),
            # 1 is not true, and 0 not false: transformers would take them for other settings, or refuse them.
            ({"key": 1}, (None, True), "key 1 of config.json is not supported; allowed: true"),
            ({"key": 0}, (None, False), "key 0 of config.json is not supported; allowed: false"),
            ({"key": 1.0}, (1,), r"key 1\.0 of config.json is not supported; allowed: 1"),
        ],
    )
    def test_others_are_refused(self, values, allowed, words):
        with pytest.raises(UnsupportedModelError, match=words):
            config(**values).need("key", *allowed)


def test_the_first_of_several_names():
    assert config(b=1, c=2).first("a", "b", "c") == "b"
    assert config(b=None).first("a", "b") == "b"
    assert config({"b": 1}).first("a", "b") == "b"
    assert config({"b": 1}, a=2).first("b", "a") == "a"
    assert config().first("a", "b") == "a"


def test_other_values_and_defaults():
    base = config({"a": 1, "b": 2}, c=3)
    changed = base.updated({"c": 4, "d": 5}, {"b": 6})
    assert [changed.integer(key) for key in "abcd"] == [1, 6, 4, 5]
    assert base.integer("b") == 2 and base.integer("c") == 3 and base.values == {"c": 3}


def test_a_directory_a_file_or_a_mapping(tmp_path):
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "other.json").write_text('{"a": 2}')
    assert HfConfig.read(tmp_path).integer("a") == HfConfig.read(str(tmp_path / "config.json")).integer("a") == 1
    assert HfConfig.read(tmp_path / "other.json").integer("a") == 2
    assert HfConfig.read(tmp_path).where == str(tmp_path / "config.json")
    with pytest.raises(HfConfigError, match="a is null in the given config"):
        HfConfig.read({}).integer("a")


class TestLayers:
    @pytest.mark.parametrize("layers", [0, -1, 100_001, 10**9])
    def test_a_number_that_no_model_has_is_refused(self, layers):
        """Before a name is made for each."""
        with pytest.raises(
            HfConfigError, match=f"num_hidden_layers of config.json is {layers}; it must be 1 to 100000;"
        ):
            assert config(num_hidden_layers=layers).layers

    def test_kinds(self):
        kinds = {"full": 0, "sliding": 1}
        found = config(num_hidden_layers=3, types=["full", "sliding", "full"]).layers_of("types", kinds)
        assert found == (0, 1, 0)
        assert config(num_hidden_layers=3).layers_of("types", kinds) is None

    def test_an_unknown_kind(self):
        with pytest.raises(UnsupportedModelError, match=r"types linear, other of .* allowed: full, sliding"):
            config(num_hidden_layers=2, types=["other", "linear"]).layers_of("types", {"full": 0, "sliding": 1})

    def test_too_few_entries(self):
        with pytest.raises(HfConfigError, match=r"types of config\.json has 2 entries, and num_hidden_layers is 3"):
            config(num_hidden_layers=3, types=["full"] * 2).layers_of("types", {"full": 0})

    @pytest.mark.parametrize(("step", "but", "found"), [(2, False, [0, 1, 0, 1, 0]), (3, True, [1, 1, 0, 1, 1])])
    def test_every_nth(self, step, but, found):
        assert config(num_hidden_layers=5, every=step).every("every", 9, but=but) == found
        assert config(num_hidden_layers=5).every("every", step, but=but) == found

    def test_every_zeroth(self):
        with pytest.raises(UnsupportedModelError, match=r"every 0 of config\.json .*; allowed: 1 or more"):
            config(num_hidden_layers=5, every=0).every("every", 1)

    def test_the_same_in_all(self):
        assert layer_freq([1, 1, 1]) == 1
        assert layer_freq([0, 1, 1]) == (0, 1, 1)


CHOSEN = {"num_experts_per_tok": 2, "moe_intermediate_size": 5}


class TestExperts:
    @pytest.mark.parametrize("name", ["num_experts", "n_routed_experts", "num_local_experts"])
    def test_any_of_the_three_names_of_their_number(self, name):
        found = expert_fields(config(**CHOSEN, **{name: 8}), normalised=False)
        wanted = {"num_experts": 8, "moe_ffn_hidden_size": 5, "moe_router_topk": 2, "moe_router_pre_softmax": True}
        assert found == wanted

    @pytest.mark.parametrize(("given", "normalised"), [(True, True), (False, False), (None, True), (None, False)])
    def test_normalised_weights_are_a_softmax_over_the_chosen(self, given, normalised):
        found = expert_fields(config(**CHOSEN, num_experts=8, norm_topk_prob=given), normalised=normalised)
        assert found["moe_router_pre_softmax"] is not normalised

    def test_a_single_expert_whose_weight_would_be_one_is_refused(self):
        single = config(num_experts=8, num_experts_per_tok=1, moe_intermediate_size=5, norm_topk_prob=True)
        with pytest.raises(UnsupportedModelError, match="num_experts_per_tok 1 with norm_topk_prob true"):
            expert_fields(single, normalised=False)
        other = single.updated({"norm_topk_prob": False})
        assert expert_fields(other, normalised=True)["moe_router_topk"] == 1


LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
# The classes of transformers, and what their configs need besides the sizes that all have.
FAMILIES = {
    LlamaConfig: {},
    MistralConfig: {},
    MixtralConfig: {},
    Qwen2Config: {},
    Qwen2MoeConfig: {**EXPERTS, "shared_expert_intermediate_size": 16},
    Qwen3Config: {},
    Qwen3MoeConfig: EXPERTS,
    Qwen3NextConfig: {},
    GlmConfig: {},
    Glm4Config: {},
    Glm4MoeConfig: ROUTED,
    DeepseekV3Config: ROUTED | LATENT,
    Glm4MoeLiteConfig: ROUTED | LATENT,
    DeepseekV32Config: ROUTED | LATENT,
    GlmMoeDsaConfig: ROUTED | LATENT,
    GptOssConfig: {},
    Gemma3TextConfig: {},
}


def written(config_class, **changes):
    """A config of a family in which ``...`` leaves a key out."""
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "vocab_size": 101,
        "max_position_embeddings": 128,
    }
    values = sizes | FAMILIES[config_class] | {"model_type": config_class.model_type} | changes
    return {key: value for key, value in values.items() if value is not ...}


LATENT_CLASSES = (DeepseekV3Config, Glm4MoeLiteConfig, DeepseekV32Config, GlmMoeDsaConfig)


@pytest.mark.parametrize("config_class", [key for key in FAMILIES if key not in LATENT_CLASSES])
def test_groups_that_are_left_out_are_the_classs(config_class):
    shape = ModelShape.from_hf_config(written(config_class))
    assert shape.num_query_groups == (config_class().num_key_value_heads if config_class is not LlamaConfig else 64)


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_null_groups_are_one_for_each_head(config_class):
    """As the classes have it that take it."""
    assert config_class(num_attention_heads=64, num_key_value_heads=None).num_key_value_heads == 64
    assert ModelShape.from_hf_config(written(config_class, num_key_value_heads=None)).num_query_groups == 64


@pytest.mark.parametrize("config_class", [Glm4MoeConfig, *LATENT_CLASSES])
def test_shared_experts_that_are_left_out(config_class):
    assert config_class().n_shared_experts == 1
    for given, width in ((..., 12), (3, 36), (0, None), (None, None)):
        shape = ModelShape.from_hf_config(written(config_class, n_shared_experts=given))
        assert shape.moe_shared_expert_intermediate_size == width


@pytest.mark.parametrize("config_class", LATENT_CLASSES)
def test_a_latent_of_queries_that_is_left_out(config_class):
    assert ModelShape.from_hf_config(written(config_class)).q_lora_rank == config_class().q_lora_rank
    assert ModelShape.from_hf_config(written(config_class, q_lora_rank=12)).q_lora_rank == 12


def test_null_means_queries_without_a_latent():
    for config_class in (DeepseekV3Config, Glm4MoeLiteConfig):
        assert ModelShape.from_hf_config(written(config_class, q_lora_rank=None)).q_lora_rank is None
    # The indexer reads the latent.
    for config_class in (DeepseekV32Config, GlmMoeDsaConfig):
        with pytest.raises(UnsupportedModelError, match=r"q_lora_rank null .* allowed: a number"):
            ModelShape.from_hf_config(written(config_class, q_lora_rank=None))


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 0, -1e-6, 10**309])
def test_numbers_that_no_model_has(key, value):
    with pytest.raises(HfConfigError, match=r"(positive and finite|larger than any number)"):
        ModelShape.from_hf_config(json.loads(json.dumps(written(LlamaConfig, **{key: value}))))


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("value", [..., 0, -1, 10**4000, 2**60, 1.5, "1", True, [1]])
def test_sizes_that_no_model_has(key, value):
    with pytest.raises(HfConfigError, match=key.removeprefix("num_hidden_")):
        ModelShape.from_hf_config(written(LlamaConfig, **{key: value}))
