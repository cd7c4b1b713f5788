import gc
import sys

import pytest

from slime_core.importing import without_collections, without_packages


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_again_after_an_import_that_fails(enabled):
    was = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with pytest.raises(ImportError), without_collections():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
        assert gc.get_freeze_count() > 0
    finally:
        gc.enable() if was else gc.disable()
        gc.unfreeze()


def test_a_package_is_absent_in_the_block_alone_and_stays_where_it_was_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    import json

    with without_packages("colorsys", "json"):
        with pytest.raises(ImportError):
            import colorsys
        assert sys.modules["json"] is json
    import colorsys

    assert colorsys.rgb_to_hsv(0, 0, 0) == (0, 0, 0)
