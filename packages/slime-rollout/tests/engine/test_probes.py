"""What a question to a process makes of its end."""

from slime_rollout.engine.errors import EngineDiedError
from slime_rollout.engine.probes import not_ready
from slime_rollout.engine.server import SGLangEngine


class DiesOnceReady(SGLangEngine):
    def __init__(self):
        pass

    def is_ready(self, timeout):
        return True

    def freeze_gc(self):
        raise EngineDiedError("ended by itself")


def test_an_engine_that_dies_once_it_is_ready_is_one_more_that_is_not():
    assert not_ready(DiesOnceReady()) == "has ended"
