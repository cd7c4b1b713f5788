"""Engines that are started once a node has room for them, with the real router and engines that are up in a moment."""

import contextlib
import signal
import types

import pytest

from slime_rollout.engine import NoRoomError, health
from slime_rollout.engine.addresses import Ports
from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.engine.server import EngineLauncher, EngineSpec, equal_specs
from support.failing_fleet import VERSIONS, Fleet, wait_until

pytestmark = pytest.mark.timeout(120)


class Room(EngineLauncher):
    """Has room for the first two engines, and for others only while ``more``."""

    more = False

    def start(self, spec, *, log_path):
        if spec.seed > 1 and not self.more:
            raise NoRoomError("no node has room for 1 of its 1 GPUs")
        return super().start(spec, log_path=log_path)


def test_a_spare_engine_comes_and_goes_with_its_node_as_often_as_it_likes(tmp_path, monkeypatch):
    monkeypatch.setattr(health, "ROOM_AGAIN_SECONDS", 0.1)
    fleet = Fleet(tmp_path, rollout_max_restarts=1, rollout_health_check_timeout=60.0)  # none is hung, at most slow
    room = Room(fleet.config, Ports())
    model = EngineSpec(model_path=str(fleet.model), device="cpu")
    first, second, spare = equal_specs(model, 3, fleet.config)
    fleet.fleet = EngineFleet.launch(fleet.config, [first, second], spare=[spare], log_dir=fleet.logs, launcher=room)
    with contextlib.closing(types.SimpleNamespace(close=fleet.fleet.stop)):
        version = next(VERSIONS)
        assert len(fleet.update(version)) == 2
        fleet.whole()
        assert fleet.fleet.process_ids()["engine 2"] == []
        assert fleet.events("engine 2") == []  # that it waits is nothing new
        fleet.fleet.begin_sleep()  # waits for no room, and finds none from here on
        room.more = True
        fleet.fleet._monitor._look_at_all()
        assert fleet.events("engine 2") == []
        fleet.fleet.end_sleep(awake=True)
        for _ in range(3):  # more often than it may be restarted
            since, room.more = fleet.now(), True
            [behind] = wait_until(fleet.fleet.engines_behind)
            assert behind not in fleet.workers() and fleet.fleet.not_serving() == ["engine 2"]
            assert fleet.update(version, only_behind=True) == [behind]
            fleet.wait_for("engine 2", "registered", since=since)
            assert fleet.workers() == {fleet.url(0), fleet.url(1), behind}
            assert {fleet.generate()["version"] for _ in range(20)} == {str(version)}
            room.more = False
            fleet.signal("engine 2", signal.SIGKILL)
            fleet.wait_for("engine 2", "no_room", since=since)
            fleet.whole()
    wait_until(lambda: not fleet.left(), what="the end of all processes")
