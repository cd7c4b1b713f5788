"""A fleet without fault tolerance, as a run sees it; `test_health` has one with it, `test_real_fleet` real engines."""

import pytest

from slime_rollout.engine import EngineError, fleet
from slime_rollout.engine.fleet import Fleet


class Plain(Fleet):
    engine_urls = ("http://e1", "http://e2")
    checks = 0

    def check(self):
        self.checks += 1

    def stop(self):
        self.stopped = True


def test_nothing_is_ever_behind_and_all_serve_where_nobody_replaces_engines():
    with Plain() as plain:
        assert (plain.not_serving(), plain.engines_behind(), plain.serves()) == ([], [], True)
        assert plain.begin_update() == plain.engine_urls and plain._updating
        assert not plain.fail_update(["http://e1"]) and not plain._updating
        assert plain.begin_update(only_behind=True) == [] and not plain._updating
        plain.confirm_update(1)
        assert plain.checks == 3
    assert plain.stopped


def test_engines_that_keep_their_memory_end_the_run_once_none_has_died(monkeypatch):
    monkeypatch.setattr(fleet, "DEATH_SECONDS", 0.3)
    plain = Plain()
    with pytest.raises(EngineError, match="engines do not hand their memory over: http://e1"):
        plain.replace(["http://e1"])
    assert plain.checks  # one that has died is the cause, and is told in place of this
