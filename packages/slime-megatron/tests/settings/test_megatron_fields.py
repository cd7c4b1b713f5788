"""The fields of Megatron's configs, read from their source."""

import typing

from slime_megatron.settings.megatron_fields import UNKNOWN, megatron_fields


def test_the_fields_are_those_of_megatrons_dataclasses(ranks, tiny_model, tiny_config):
    ranks.start(1, tiny_config(), tiny_model("qwen3").shape)
    wanted = ranks.first("megatron_dataclasses")
    read = megatron_fields()
    assert read.keys() == wanted.keys()
    plain = {name: default for name, default in wanted.items() if default != "?"}
    assert len(plain) > 250
    assert {name: read[name].default for name in plain} == plain
    assert all(read[name].default is UNKNOWN for name in wanted.keys() - plain.keys())


def test_annotations_become_types():
    fields = megatron_fields()
    assert fields["bucket_size"].hint == int | None
    assert fields["moe_aux_loss_coeff"].hint == float | list[float]
    assert fields["window_size"].hint == tuple[int, int] | None
    assert fields["moe_token_drop_policy"].hint == typing.Literal["probs", "position"]
    assert fields["init_method"].is_function
    assert fields["add_bias_linear"].words == ("--disable-bias-linear",)
    assert fields["lr"].owners == {"OptimizerConfig"}
