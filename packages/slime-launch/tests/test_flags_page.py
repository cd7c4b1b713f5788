import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "flags_page.py"


@pytest.mark.skipif(not SCRIPT.is_file(), reason="outside the repository")
def test_the_page_of_flags_is_up_to_date():
    spec = importlib.util.spec_from_file_location("flags_page", SCRIPT)
    flags_page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(flags_page)
    assert flags_page.PAGE.read_text(encoding="utf-8") == flags_page.page(), "run: python scripts/flags_page.py"
