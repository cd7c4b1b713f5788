import dataclasses

from slime_core.effects import asks, missing_need, note, refusal, refusals, shown_needs, without_effect
from slime_core.flags import Config, collected_problems, flag, flag_specs, flag_values
from slime_core.needs import TRAINS, given, unless


@dataclasses.dataclass(frozen=True, kw_only=True)
class Garden(Config):
    water: bool = flag(False, help="water it")
    hose: str | None = flag(None, help="with a hose", needs=given("water"))
    nozzle: float = flag(1.0, help="through a nozzle", needs=given("hose"))
    rain: bool = flag(False, help="wait for rain", needs=unless("water"))
    harvest: int = flag(0, help="baskets", needs=TRAINS)


SPECS = {spec.dest: spec for spec in flag_specs(Garden)}


def values(**given):
    with collected_problems():
        return flag_values(Garden(**given))


def test_a_value_asks_unless_it_is_nothing_or_the_default():
    assert asks(SPECS["nozzle"], 2.0) and not asks(SPECS["nozzle"], 1.0) and not asks(SPECS["nozzle"], 0)


def test_a_flag_that_needs_one_without_effect_has_none_either():
    need = given("water")
    assert missing_need(SPECS["nozzle"], SPECS, values(nozzle=2.0)) == given("hose")
    assert missing_need(SPECS["nozzle"], SPECS, values(nozzle=2.0, hose="long")) == need
    assert missing_need(SPECS["nozzle"], SPECS, values(nozzle=2.0, hose="long", water=True)) is None
    found = without_effect(SPECS, values(hose="long", nozzle=2.0), ["hose", "nozzle", "unknown"])
    assert found == {need: [SPECS["hose"], SPECS["nozzle"]]}


def test_flags_without_effect_are_refused_in_a_line_each():
    assert list(refusals(SPECS, values(hose="long", nozzle=2.0))) == [
        "--hose long, --nozzle 2.0 have no effect without --water; give --water, or leave them out"
    ]
    assert list(refusals(SPECS, values(rain=True, water=True, harvest=3))) == [
        "--rain has no effect with --water; leave one of them out"
    ]


def test_a_kind_of_run_is_named_with_the_flag_that_makes_it():
    idle = [SPECS["harvest"]]
    assert missing_need(SPECS["harvest"], SPECS, values(harvest=3), missing=["trains"]) == TRAINS
    assert refusal(TRAINS, idle, values(harvest=3), "--evaluate") == (
        "--harvest 3 has no effect, as nothing is trained with --evaluate; leave it out"
    )
    assert note(TRAINS, idle, values()) == "no effect, as nothing is trained: --harvest"
    assert shown_needs(SPECS["hose"], SPECS) == ["needs --water"] and shown_needs(SPECS["rain"], SPECS) == []
