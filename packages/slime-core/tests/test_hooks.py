import copy
import dataclasses
import pickle

import pytest

from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError
from slime_core.hooks import HookArgs

ARGS = HookArgs({"max_turns": 5, "rollout_temperature": 0.7, "load": None})


def test_flags_by_name():
    assert (ARGS.max_turns, ARGS.load) == (5, None)
    assert "max_turns" in ARGS
    assert "nothing" not in ARGS
    assert list(ARGS) == ["max_turns", "rollout_temperature", "load"]
    assert "max_turns" in dir(ARGS)
    assert getattr(ARGS, "nothing", 3) == 3


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(AttributeError, match=r"no flag is called max_turn; did you mean max_turns\?"):
        _ = ARGS.max_turn
    with pytest.raises(AttributeError, match="there are 3: see dir"):
        _ = ARGS.zzzz


def test_read_only():
    with pytest.raises(AttributeError, match="read-only, so max_turns cannot be set"):
        ARGS.max_turns = 6
    with pytest.raises(AttributeError, match="read-only, so max_turns cannot be deleted"):
        del ARGS.max_turns
    source = {"max_turns": 5}
    args = HookArgs(source)
    source["max_turns"] = 6
    assert args.max_turns == 5


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda args: pickle.loads(pickle.dumps(args))])
def test_copies_and_pickles(clone):
    assert clone(ARGS) == ARGS
    assert clone(ARGS) != HookArgs({})
    assert clone(ARGS).max_turns == 5


def test_an_object_that_is_not_made_yet_has_no_flags():
    with pytest.raises(AttributeError, match="_values"):
        _ = HookArgs.__new__(HookArgs).max_turns


def test_from_configs():
    @dataclasses.dataclass(frozen=True)
    class Other:
        eps_clip: float = 0.2
        max_turns: int = 4

    args = HookArgs.from_configs(AlgorithmConfig(), Other(), extra="x")
    assert (args.eps_clip, args.max_turns, args.extra, args.advantage_estimator) == (0.2, 4, "x", "grpo")
    with pytest.raises(ConfigError, match=r"eps_clip is 0.2 and, in Other, 0.3"):
        HookArgs.from_configs(AlgorithmConfig(), Other(eps_clip=0.3))
