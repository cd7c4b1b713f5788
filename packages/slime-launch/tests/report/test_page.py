import base64
import gzip
import json
import math
import re
from html.parser import HTMLParser
from importlib.resources import files

import numpy as np
import pytest

from slime_launch.report.page import PER_TOKEN, SCRIPTS, page, policy, split, to_json
from support.made_runs import make_data, make_run

ASSETS = files("slime_launch.report").joinpath("assets")
PLANTED = '</script><script>window.planted = 1</script><img src=x onerror="window.planted = 1">'


class Elements(HTMLParser):
    """Every element of a page with its attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.found, self.open = [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs), []))
        self.open = True

    def handle_data(self, data):
        if self.open:
            self.found[-1][2].append(data)

    def handle_endtag(self, tag):
        self.open = False

    def texts(self, tag, **attributes):
        """Texts of elements that have these attributes, and of scripts and styles only those without a type."""
        return [
            "".join(text)
            for each, has, text in self.found
            if each == tag and (has == attributes if not attributes else attributes.items() <= has.items())
        ]


@pytest.fixture(scope="module")
def data():
    return make_data(make_run(rollouts=6, samples=230, length=12), make_run("second", seed=1, rollouts=4, samples=8))


@pytest.fixture(scope="module")
def made(data):
    return page(data)


def unpacked(text, name):
    (packed,) = Elements(text).texts("script", id=name)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_the_data_come_back(data, made):
    head = unpacked(made, "data")
    packs = {}
    for given, run in zip(data["runs"], head["runs"], strict=True):
        assert {name: run[name] for name in run if name != "samples"} == {
            name: given[name] for name in given if name != "samples"
        }
        for expected, sample in zip(given["samples"], run["samples"], strict=True):
            number, place = sample.pop("pack")
            if number not in packs:
                packs[number] = unpacked(made, f"tokens-{number}")
            assert sample | packs[number][place] == expected
    assert len(packs) == 3


def test_what_is_known_per_token_is_not_in_the_first_part(data):
    light, packs = split(data)
    assert not any(name in sample for run in light["runs"] for sample in run["samples"] for name in PER_TOKEN)
    assert data["runs"][0]["samples"][0]["tokens"], "the caller's data are left as they are"
    assert sum(map(len, packs)) == 238


def test_the_policy_allows_just_what_is_written(made):
    elements = Elements(made)
    (meta,) = (has for tag, has, _ in elements.found if has.get("http-equiv") == "Content-Security-Policy")
    scripts, styles = elements.texts("script"), elements.texts("style")
    assert len(scripts) == len(SCRIPTS) + 2 and len(styles) == 3
    assert meta["content"] == policy(scripts, styles, live=False)
    assert meta["content"].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in meta["content"] and "connect-src" not in meta["content"]
    assert "connect-src 'self'" in policy(scripts, styles, live=True)


def test_it_refers_to_nothing_outside(made):
    elements = Elements(made)
    links = [has[name] for _, has, _ in elements.found for name in ("src", "href", "action", "data") if name in has]
    assert sorted(links) == ["#main", "data:,"]
    assert not [name for _, has, _ in elements.found for name in has if name.startswith("on")]
    assert not re.search(r"@import|url\(", "".join(elements.texts("style")))
    addresses = set(re.findall(r"https?://[^\s\"')]+", made))
    assert addresses == {"https://github.com/leeoniya/uPlot", "http://www.w3.org/2000/svg"}  # a comment, a namespace
    assert "sourceMappingURL" not in made


def test_text_of_a_run_is_nowhere_in_the_markup():
    run = make_run(PLANTED, rollouts=2, samples=2)
    run["samples"][0] |= {"prompt": PLANTED, "tokens": [PLANTED], "metadata": {PLANTED: PLANTED}}
    made = page(make_data(run))
    assert "planted" not in made
    assert Elements(made).texts("img") == []
    assert unpacked(made, "data")["runs"][0]["samples"][0]["prompt"] == PLANTED


def test_our_scripts_insert_no_markup():
    ways = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|\.href\s*=")
    for name in SCRIPTS:
        assert not ways.search(ASSETS.joinpath(name).read_text(encoding="utf-8")), name


def test_every_script_is_in_the_page():
    assert sorted(SCRIPTS) == sorted(each.name for each in ASSETS.iterdir() if each.name.endswith(".js"))


def test_libraries_come_with_their_licences(made):
    for holder in ("Copyright (c) 2022 Leon Sorokin", "Copyright (c) 2015-2026 Oli Folkerd"):
        assert holder in made
    for library in ("uplot", "tabulator"):
        assert "Permission is hereby granted" in ASSETS.joinpath("vendor", library, "LICENSE").read_text(
            encoding="utf-8"
        )


def test_an_empty_run_has_a_small_page():
    assert len(page(make_data({"name": "empty", "state": "running"}))) < 1_000_000


def test_values_that_json_has_no_word_for():
    values = {
        "floats": [1.5, math.nan, math.inf],
        "array": np.array([1, 2], dtype=np.int32),
        "half": "a\ud800b",
        3: None,
    }
    assert json.loads(to_json(values)) == {"floats": [1.5, None, None], "array": [1, 2], "half": "a?b", "3": None}
