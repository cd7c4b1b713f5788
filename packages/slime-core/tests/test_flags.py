import dataclasses

import pytest

from slime_core.config import AlgorithmConfig
from slime_core.flags import flag, flag_specs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    prompt_data: str = flag(help="where the prompts are", metavar="FILE")
    lr_decay: float | None = flag(None, help="decay", unit="per step")
    eval_prompt_data: tuple[str, ...] = flag((), help="name and path pairs")
    use_kl: bool = flag(False, help="add KL")
    kind: str = flag("a", help="which", choices=("a", "b"), name="--the-kind")
    layers: tuple[bool, ...] = flag((), help="one per layer")
    hidden: int = 3


def test_every_kind_of_field():
    specs = {spec.dest: spec for spec in flag_specs(Config)}
    assert list(specs) == ["prompt_data", "lr_decay", "eval_prompt_data", "use_kl", "kind", "layers"]
    assert specs["prompt_data"].name == "--prompt-data"
    assert specs["prompt_data"].default is dataclasses.MISSING
    assert specs["prompt_data"].metavar == "FILE"
    assert (specs["lr_decay"].type, specs["lr_decay"].default, specs["lr_decay"].unit) == (float, None, "per step")
    assert (specs["eval_prompt_data"].type, specs["eval_prompt_data"].nargs) == (str, "+")
    assert specs["use_kl"].is_switch
    assert not specs["lr_decay"].is_switch
    assert not specs["layers"].is_switch
    assert (specs["kind"].name, specs["kind"].choices) == ("--the-kind", ("a", "b"))


def test_a_type_that_no_command_line_can_hold_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Bad:
        table: dict[str, int] | None = flag(None, help="no")  # noqa: RUF009

    with pytest.raises(TypeError, match="must be str, int, float, bool"):
        list(flag_specs(Bad))


def test_the_algorithms_table_is_complete_and_its_defaults_are_the_dataclass_defaults():
    specs = {spec.dest: spec for spec in flag_specs(AlgorithmConfig)}
    config = AlgorithmConfig()
    assert list(specs) == [field.name for field in dataclasses.fields(config)]
    for dest, spec in specs.items():
        assert spec.name == "--" + dest.replace("_", "-")
        assert spec.default == getattr(config, dest)
        assert spec.help
        assert not spec.help.endswith(".")
