"""The page in a narrow window, the colours of kinds of work, and the axes of charts, in a real browser."""

import pytest

from support.made_runs import TABS

KINDS_OF_WORK = (
    *("generate", "score", "train", "send", "save", "export", "evaluate", "forward_backward", "critic", "optimizer"),
    *("log_probs", "ref_log_probs", "values", "split", "hand over", "weight_sums"),
)
NARROW = 400
# Words that a line ends within; of codes and texts of samples any character may be the last.
BROKEN = """
const broken = [];
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const node = walk.currentNode;
  if (node.parentElement.closest("script, style, pre, code, .passage, .tokens, .tabulator-cell, footer")) continue;
  for (const match of node.data.matchAll(/[A-Za-z]{2,}/g)) {
    const range = document.createRange();
    range.setStart(node, match.index);
    range.setEnd(node, match.index + match[0].length);
    if (new Set([...range.getClientRects()].map((one) => Math.round(one.top))).size > 1) broken.push(match[0]);
  }
}
return broken;
"""
# What is drawn beyond the window, but for long lines that scroll in a box of their own.
BEYOND = """
const width = document.documentElement.clientWidth;
const found = [...document.querySelectorAll("header *, main *")].filter((one) => {
  const box = one.getBoundingClientRect();
  const scrolls = one.closest("pre, canvas, .unseen, .u-over, .passage, .tokens");
  return box.width && box.height && box.right > width + 1 && !scrolls;
});
return found.map((one) => `${one.tagName}.${one.className} ${one.textContent.slice(0, 30)}`);
"""


@pytest.fixture
def narrow(reader):
    """The page in a window as wide as a telephone's."""
    metrics = {"width": NARROW, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    reader.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    yield reader
    reader.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("name", TABS)
@pytest.mark.parametrize("runs", ["one", "two"])
def test_a_narrow_window_has_all_of_a_tab_and_breaks_no_word(narrow, request, runs, name):
    narrow.open(request.getfixturevalue(runs))
    narrow.tab(name)
    assert narrow.js("return document.documentElement.scrollWidth") <= NARROW
    assert narrow.js(BEYOND) == []
    assert narrow.js(BROKEN) == []
    assert narrow.problems() == []


def test_a_narrow_window_shows_prompts(narrow, one):
    narrow.open(one)
    narrow.tab("samples")
    narrow.wait(lambda: narrow.js("return document.querySelectorAll('[tabulator-field=prompt].tabulator-cell').length"))
    box = narrow.js(
        "return document.querySelector('.tabulator-cell[tabulator-field=prompt]').getBoundingClientRect().toJSON()"
    )
    assert box["width"] >= 100 and box["left"] >= 0 and box["right"] <= NARROW


@pytest.mark.parametrize("kinds", [KINDS_OF_WORK, (*KINDS_OF_WORK[:8], "own", "wait for engines", "wait for trainers")])
def test_each_kind_of_work_has_a_colour_of_its_own(reader, one, kinds):
    reader.open(one)
    colours = reader.js("return Report.workColours(arguments[0]).map(Report.colour)", list(kinds))
    waits = [colour for kind, colour in zip(kinds, colours, strict=True) if kind.startswith("wait")]
    others = [colour for kind, colour in zip(kinds, colours, strict=True) if not kind.startswith("wait")]
    assert len(set(others)) == len(others) and not set(waits) & set(others)
    assert len(set(waits)) <= 1


@pytest.mark.parametrize(
    ("values", "least", "most"),
    [([-0.0, -0.0], -1, 1), ([0.5, 0.5], 0.4, 0.6), ([-3e-9, -3e-9], -4e-9, -2e-9), ([2.0, 3.0], 1.5, 3.5)],
)
def test_an_axis_is_around_its_values(reader, one, values, least, most):
    reader.open(one)
    shown = reader.js(
        """const line = { label: "a", colour: "--c0", x: [0, 1], values: arguments[0] };
        const card = Report.card({ title: "t", kind: "k", xTitle: "x", lines: [line] });
        document.body.prepend(card.node);
        window.made = card;
        return true;""",
        values,
    )
    assert shown
    reader.wait(lambda: reader.js("return Boolean(window.made.scale?.())"))
    low, high = reader.js("return window.made.scale()")
    assert least <= low <= min(values) <= max(values) <= high <= most
    assert not reader.js("return window.made.node.innerText").count("-0")


@pytest.mark.parametrize("value", [-0.0001234, -123456, -0.5])
def test_the_labels_of_an_axis_fit_beside_it(reader, one, value):
    """What is drawn of a label begins within the canvas, so that its sign is there."""
    reader.open(one)
    reader.js(
        """const line = { label: "a", colour: "--c0", x: [0, 1], values: arguments[0] };
        window.drawn = [];
        const draw = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
          const { a, e } = this.getTransform(), width = this.measureText(text).width;
          const left = this.textAlign === "right" ? x - width : this.textAlign === "center" ? x - width / 2 : x;
          window.drawn.push([text, a * left + e]);
          return draw.apply(this, arguments);
        };
        window.made = Report.card({ title: "t", kind: "k", xTitle: "x", lines: [line] });
        document.body.prepend(window.made.node);""",
        [value, value * 1.001],
    )
    labels = reader.wait(lambda: reader.js("return window.drawn.filter(([text]) => text.startsWith('-'))"))
    assert labels and min(left for _, left in labels) >= 0
