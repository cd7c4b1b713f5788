import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "features_page.py"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="outside the repository")


@pytest.fixture
def installed_sglang():
    """The page has a stand-in of its own."""


@pytest.fixture(scope="module")
def features_page():
    spec = importlib.util.spec_from_file_location("features_page", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["features_page"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    with module.stand_ins():
        yield module
    del sys.modules["features_page"]


@pytest.mark.full
def test_the_page_of_features_is_up_to_date(features_page):
    assert features_page.PAGE.read_text(encoding="utf-8") == features_page.page(), (
        "run: python scripts/features_page.py"
    )


def test_every_feature_is_accepted_alone_and_has_an_effect(features_page):
    for feature in features_page.FEATURES:
        why, without_effect = features_page.answer(feature)
        assert why == "", feature.name
        assert [line for line in without_effect if line.split(":")[0] in feature.words] == [], feature.name


def test_a_sample_of_the_pairs_is_as_the_page_says(features_page):
    """Every 50th of all pairs: a command is read and checked, and the page has its answer."""
    _, refused, idle = features_page.PAGE.read_text(encoding="utf-8").split("\n## ")[-3:]
    for one, other in features_page.pairs()[::50]:
        row = f"| {one.name} | {other.name} | "
        why, without_effect = features_page.answer(one, other)
        assert (f"{row}{why} |" in refused) if why else (row not in refused), row
        new = without_effect - features_page.answer(one)[1] - features_page.answer(other)[1]
        assert (row in idle) == bool(new and not why), row
