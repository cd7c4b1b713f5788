import gc

import pytest

from slime_core.importing import without_collections


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
