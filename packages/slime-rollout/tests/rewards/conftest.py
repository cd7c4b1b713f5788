import pytest


@pytest.fixture(autouse=True, scope="module")
def event_loop_that_ends(request):
    """Closes a module's ``LOOP``; what still waits on it would otherwise be reported in another module's test."""
    yield
    if loop := getattr(request.module, "LOOP", None):
        loop.close()
