"""The generation half as one object; its engines are scripted here, and real in the integration tests."""

import pytest

from slime_core.errors import SlimeError
from slime_core.interfaces import Batches, Engines
from slime_rollout.generation_service import GenerationService


def test_it_implements_the_protocol(service):
    assert isinstance(service, Batches) and isinstance(service.engines, Engines)


def test_methods_that_went_to_the_engines_are_found_with_a_warning(service):
    with pytest.warns(DeprecationWarning, match="is now GenerationService.engines.canary_log_probs"):
        assert service.score == service.engines.canary_log_probs
    with pytest.raises(AttributeError, match="no attribute 'begin'"):
        getattr(service, "be" + "gin")


def test_what_is_not_started_is_told(service):
    with pytest.raises(SlimeError, match="the engines are not started"):
        GenerationService(service.engines.spec).generate(0)


def test_a_rollout_is_trained_from_the_version_that_was_confirmed_last(service, engine, reply):
    engine.answer = lambda number, body: reply(version="7")
    assert service.engines.begin_update().engine_urls == (engine.url,)
    service.engines.confirm_update(7)
    assert [service.generate(number).weight_version for number in (0, 1)] == [7, 7]  # no update between them
    assert service.engines.fleet.updates == [7]
    service.close()
    assert service.engines.fleet.updates == [7, "stop"]
