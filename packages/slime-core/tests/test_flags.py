import dataclasses

import pytest

from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError
from slime_core.flags import Config, collected_problems, flag, flag_specs, flag_values, template_problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain:
    prompt_data: str = flag(help="where the prompts are", metavar="FILE")
    lr_decay: float | None = flag(None, help="decay", unit="per step")
    eval_prompt_data: tuple[str, ...] = flag((), help="name and path pairs")
    use_kl: bool = flag(False, help="add KL")
    kind: str = flag("a", help="which", choices=("a", "b"), name="--the-kind")
    layers: tuple[bool, ...] = flag((), help="one per layer")
    hidden: int = 3


def test_every_kind_of_field():
    specs = {spec.dest: spec for spec in flag_specs(Plain)}
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked(Config):
    rate: float = flag(0.5, above=0, most=1, advice="0.5 is usual", help="a rate")
    counts: tuple[int, ...] = flag((), least=1, help="counts", may_change=True)
    kind: str | None = flag(None, choices=("a", "b"), help="a kind")
    both: bool = flag(False, help="needs a kind")

    def contradictions(self):
        if self.both and self.kind is None:
            yield "--both needs --kind"


def test_every_value_out_of_range_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        Checked(rate=2.0, counts=(3, 0), kind="c", both=True)
    assert str(caught.value).splitlines() == [
        "--rate 2.0 must be above 0 and at most 1; 0.5 is usual",
        "--counts 0 must be 1 or more",
        "--kind c is unknown; allowed: a, b",
    ]
    with pytest.raises(ConfigError, match="--both needs --kind"):
        Checked(both=True)
    assert Checked(rate=1.0, counts=(1, 2), kind="b", both=True).kind == "b"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer(Config):
    checked: Checked
    size: int = flag(1, least=1, help="a size")


def test_configs_in_a_config():
    made = Outer.of(rate=0.25, size=3)
    assert made == Outer(checked=Checked(rate=0.25), size=3)
    assert flag_values(made) == {"rate": 0.25, "counts": (), "kind": None, "both": False, "size": 3}
    assert [spec.dest for spec in flag_specs(Outer)] == list(flag_values(made))
    assert made.changed(rate=1.0, size=2) == Outer(checked=Checked(rate=1.0), size=2)
    with pytest.raises(ConfigError, match="--rate 3 must be"):
        made.changed(rate=3)
    with pytest.raises(TypeError, match="speed"):
        Outer.of(speed=1)


def test_problems_are_collected_instead_of_raised_within_a_block():
    with collected_problems() as found:
        made = Outer.of(rate=3, size=0)
    assert made.checked.rate == 3 and made.size == 0
    assert [line.split(" must")[0] for line in found] == ["--rate 3", "--size 0"]
    with pytest.raises(ConfigError, match="--size 0 must be"):
        Outer.of(rate=0.5, size=0)


@pytest.mark.parametrize(
    ("template", "fine"),
    [
        ("a/{rollout_id:07d}-{rank}.npz", True),
        (None, True),
        ("a/{rollout_id}.npz", False),
        ("a/{rollout_id}-{rank}-{step}.npz", False),
        ("a/{rollout_id}-{rank}-{}.npz", False),
        ("a/{rollout_id}-{rank", False),
    ],
)
def test_templates_of_paths(template, fine):
    problem = template_problem("--save-it", template, ("rollout_id", "rank"))
    wanted = f"--save-it {template} must hold {{rollout_id}} and {{rank}}, which are filled in, and no other braces"
    assert problem == (None if fine else wanted)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithTable(Config):
    size: int = flag(1, help="a flag")
    table: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Around(Config):
    inner: WithTable = dataclasses.field(default_factory=WithTable)
    more: dict[str, int] = dataclasses.field(default_factory=dict)


def test_fields_that_are_no_flags_outlive_a_change():
    made = Around.of(table={"a": 1}, more={"b": 2})
    assert made.changed(size=2) == Around(inner=WithTable(size=2, table={"a": 1}), more={"b": 2})
    assert made.changed(table={}).inner == WithTable()
