"""The page in a real browser: every tab, filters, keys, colours, a live run, and text that tries to be executed."""

import json
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slime_launch.report.collect import report_data
from slime_launch.report.page import page
from slime_launch.tracking import Tracker
from support.made_runs import TABS, make_data, make_run
from support.run_files import keep, kept_sample, write_run

pytest.importorskip("selenium", reason="selenium is not installed: pip install selenium")
from selenium.webdriver.common.keys import Keys

PLANTED = (
    "</script><script>window.planted = 1</script><img src=x onerror='window.planted = 1'>"
    "<svg onload='window.planted = 1'></svg><a href='javascript:window.planted = 1'>a link</a>"
)


def test_every_tab_opens_without_a_complaint_or_a_request(reader, one):
    reader.open(one)
    for name in TABS:
        reader.tab(name)
    assert reader.problems() == []
    assert reader.requests() == []


def test_the_files_of_a_run_become_a_page_with_everything(reader, tmp_path):
    """What is collected has the names that the page reads: nothing is empty."""
    run = write_run(tmp_path / "run")
    loop = {"loop": [["generate", 100.0, 3.0], ["train", 103.0, 2.0]], "rank 0": [["optimizer", 104.0, 0.5]]}
    with (run / "metrics.jsonl").open("a") as file:
        row = {"kind": "timeline", "step": 1, "rollout_id": 1, "time": 105.0, "spans": loop}
        file.write(json.dumps(row) + "\n")
    shown = {"group": 0, "trajectory": 0, "prompt": "2 + 2 =", "label": "4", "reward": 1.0, "rewards": None}
    shown |= {"status": "completed", "failure": None, "length": 2, "tokens": [" 4", "!"], "mask": None, "metadata": {}}
    computed = {"0": {"train_log_probs": [-0.5, -0.75], "advantages": [0.25, 0.25]}}
    keep(run, 0, [kept_sample(0, log_probs=[-0.5, -0.7], **shown)], computed)
    (run / "logs").mkdir()
    event = {"time": "2026-01-01T00:00:00+00:00", "engine": "engine 1", "event": "replaced", "detail": "after 3 s"}
    (run / "logs" / "engine_events.jsonl").write_text(json.dumps(event) + "\n")
    path = tmp_path / "report.html"
    path.write_text(page(report_data([run])), encoding="utf-8")
    reader.open(path.as_uri())
    wanted = {
        "overview": ("2 of 2", "0.250 → 0.750", "--num-rollout 2"),
        "time": ("optimizer", "rank 0", "trainers wait: generate"),
        "samples": ("1 of 1", "2 + 2 ="),
        "data": ("all_wrong", "engine 1", "replaced after 3 s"),
        "settings": ("eval_prompt_data", "config file"),
    }
    for name in TABS:
        reader.tab(name)
        for words in wanted.get(name, ()):
            reader.shows(f"#panel-{name}", words)
    reader.tab("samples")
    reader.labelled("next").click()
    reader.wait(lambda: "0.25" in reader.text(".detail"))
    assert reader.problems() == []


def test_a_run_that_has_only_begun_has_every_tab(reader, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page(make_data({"name": "new", "state": "running"})), encoding="utf-8")
    reader.open(path.as_uri())
    for name in TABS:
        reader.tab(name)
    assert reader.problems() == []


def test_the_overview_shows_figures_curves_and_evaluations(reader, one):
    reader.open(one)
    panel = reader.text("#panel-overview")
    for words in ("30 of 30", "KL divergence", "Idle share", "aime", "slime-launch train"):
        assert words in panel
    reader.wait(lambda: reader.js("return document.querySelectorAll('#panel-overview canvas').length >= 4"))
    described = reader.js(
        "return document.querySelector('#panel-overview .plot[aria-label]').getAttribute('aria-label')"
    )
    assert "after step" in described and "least" in described
    row = reader.text("#panel-overview section table tbody tr")
    assert "–" in row and "aime" in row


def test_a_chart_is_a_table_too(reader, one):
    reader.open(one)
    reader.labelled("Reward as a table").click()
    reader.one("#panel-overview .card .scroll table")
    rows = reader.js("return document.querySelectorAll('#panel-overview .card .scroll tbody tr').length")
    assert rows == 30


def test_arrow_keys_read_a_chart(reader, one):
    reader.open(f"{one}#curves")
    plot = reader.one("#panel-curves .plot[aria-label]")
    plot.send_keys(Keys.HOME)
    reader.wait(lambda: "step 1" in reader.text("#panel-curves .card .legend"))
    plot.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    reader.wait(lambda: "step 3" in reader.text("#panel-curves .card .legend"))


def test_any_series_can_be_picked_and_smoothed(reader, one):
    reader.open(f"{one}#curves")
    before = reader.js("return document.querySelectorAll('#panel-curves .card').length")
    reader.labelled("find a series").send_keys("other_3")
    shown = (
        "return [...document.querySelectorAll('#panel-curves .picks label:not([hidden])')].map((one) => one.innerText)"
    )
    assert reader.js(shown) == ["other_3"]
    reader.one("#panel-curves .picks label:not([hidden]) input").click()
    assert reader.js("return document.querySelectorAll('#panel-curves .card').length") == before + 1
    reader.shows("#panel-curves .card", "train/other_3")
    reader.choose("smooth over", "20 points")
    assert reader.problems() == []


def test_the_timeline_is_read_by_keys(reader, one):
    reader.open(f"{one}#time")
    canvas = reader.one("#panel-time canvas")
    canvas.send_keys(Keys.ARROW_RIGHT)
    assert reader.text("#panel-time .said").startswith("loop: generate, step 1")
    canvas.send_keys(Keys.ARROW_DOWN)
    assert reader.text("#panel-time .said").startswith("engine 0: generate, step 1")
    canvas.send_keys("++", Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    reader.shows("#panel-time .said", "step 2")
    reader.labelled("go to step").send_keys("7\t")
    for words in ("trainers wait for generation", "51.0 %", "rank 3"):
        reader.shows("#panel-time", words)


def test_filters_leave_what_passes(reader, one):
    reader.open(f"{one}#samples")
    reader.wait(lambda: reader.count().startswith("120 of 120"))
    assert "15\u2009360 were generated" in reader.count()
    reader.choose("dropped", "zero_std")
    reader.wait(lambda: reader.count().startswith("24 of"))
    reader.labelled("length from").send_keys("60")
    reader.wait(lambda: not reader.count().startswith("24 of"))
    least = reader.js(
        "return Math.min(...Tabulator.findTable('.samples')[0].getData('active').map((row) => row.length))"
    )
    assert least >= 60
    reader.labelled("clear filters").click()
    reader.wait(lambda: reader.count().startswith("120 of"))
    reader.labelled("reward to").send_keys("0")
    reader.wait(lambda: not reader.count().startswith("120"))
    rewards = "return [...new Set(Tabulator.findTable('.samples')[0].getData('active').map((row) => row.reward))]"
    assert reader.js(rewards) == [0]


def test_a_search_reads_prompts_and_responses(reader, one):
    reader.open(f"{one}#samples")
    reader.labelled("text").send_keys("what is 17 times")
    reader.wait(lambda: reader.count().startswith("1 of"))
    reader.labelled("clear filters").click()
    reader.wait(lambda: reader.count().startswith("120 of"))
    samples = reader.js("return Report.run().samples.map(({ index, length, cut }) => ({ index, length, cut }))")
    longest = max((each for each in samples if not each["cut"]), key=lambda each: each["length"])["index"]
    words = "return Report.whole(Report.run().samples[arguments[0]]).then((one) => one.tokens.slice(-30).join(''))"
    reader.labelled("text").send_keys(" ".join(reader.js(words, longest).upper().split()))
    reader.wait(lambda: reader.count().startswith("1 of"))
    reader.labelled("next").click()
    reader.wait(lambda: f"Sample {longest}" in reader.text(".detail"))


def test_the_table_is_sorted_and_walked_by_keys(reader, one):
    reader.open(f"{one}#samples")
    reader.choose("sort by", "length")
    reader.labelled("greatest first").click()
    lengths = "return Tabulator.findTable('.samples')[0].getData('active').map((row) => row.length)"
    reader.wait(lambda: reader.js(lengths) == sorted(reader.js(lengths), reverse=True))
    table = reader.one("#panel-samples .samples")
    table.send_keys(Keys.ARROW_DOWN)
    longest = reader.js(lengths)[:2]
    reader.wait(lambda: f"{longest[0]} tokens" in reader.text(".detail .figures"))
    table.send_keys(Keys.ARROW_DOWN)
    reader.wait(lambda: f"{longest[1]} tokens" in reader.text(".detail .figures"))
    assert reader.js("return document.querySelectorAll('.tabulator-selected').length") == 1


def test_a_link_opens_a_sample_whose_tokens_are_coloured(reader, one):
    reader.open(f"{one}#samples?rollout=2&index=10")
    reader.wait(lambda: "Sample 10" in reader.text(".detail"))
    reader.shows(".detail .tokens", "500 tokens left out")
    coloured = "return [...document.querySelectorAll('.tokens span')].filter((one) => one.style.background).length"
    for name in ("advantage", "log-prob drift", "surprise", "mask", "version", "turn"):
        reader.choose("colour by", name)
        reader.wait(lambda: reader.js(coloured) > 3)
        assert reader.text(".detail .legend")
    reader.choose("colour by", "nothing")
    assert reader.js(coloured) == 0
    reader.one(".tokens").send_keys(Keys.HOME, Keys.ARROW_RIGHT)
    values = reader.text(".token-values")
    for words in ("token 2 of", "engine log p", "trainer log p", "drift", "advantage", "weights", "mask"):
        assert words in values


def test_the_tree_has_trajectories_and_turns(reader, one):
    reader.open(f"{one}#samples?rollout=2&index=10")
    reader.wait(lambda: "Sample 10" in reader.text(".detail"))
    tree = reader.text(".tree")
    for words in ("group 2", "trajectory 8", "trajectory 10", "turn 1", "tool, template", "turn 2"):
        assert words in tree
    root = reader.one(".tree [role=treeitem]")
    root.send_keys(Keys.ARROW_LEFT)
    assert root.get_attribute("aria-expanded") == "false"
    root.send_keys(Keys.ARROW_RIGHT)
    root.send_keys(Keys.ARROW_DOWN)
    assert reader.js("return document.activeElement.innerText").startswith("trajectory 8")
    reader.js("return document.activeElement").send_keys(Keys.ENTER)
    reader.wait(lambda: "Sample 8" in reader.text(".detail"))
    assert reader.driver.current_url.endswith("#samples?rollout=2&index=8")


def test_ledger_staleness_and_events(reader, one):
    reader.open(f"{one}#data")
    for words in (
        "the ledger balances",
        "77 were generated again",
        "zero_std",
        "4\u2009100\u2009000",
        "died: exit code 137",
    ):
        reader.shows("#panel-data", words)


def test_settings_are_found_by_name_and_origin(reader, one):
    reader.open(f"{one}#settings")
    reader.labelled("find", "#panel-settings").send_keys("batch_size")
    reader.wait(lambda: "2 settings" in reader.text("#panel-settings"))
    reader.choose("origin", "derived")
    reader.wait(lambda: "1 settings" in reader.text("#panel-settings"))
    reader.shows("#panel-settings table", "global_batch_size")


def test_tabs_by_keys_and_names_for_screen_readers(reader, one):
    reader.open(one)
    reader.one("#tab-overview").send_keys(Keys.ARROW_RIGHT)
    assert reader.js("return document.activeElement.id") == "tab-curves"
    reader.one("#tab-curves").send_keys(Keys.END)
    assert reader.js("return document.activeElement.id") == "tab-settings"
    assert reader.driver.current_url.endswith("#settings")
    for name in TABS:
        reader.tab(name)
    nameless = """
      return [...document.querySelectorAll("input, select, button, canvas[tabindex], [tabindex='0']")]
      .filter((one) => one.getAttribute("role") !== "treeitem" && one.checkVisibility() &&
        !(one.ariaLabel || one.getAttribute("aria-labelledby") || one.labels?.[0]?.innerText || one.innerText))
      .map((one) => one.outerHTML.slice(0, 100))"""
    for name in TABS:
        reader.tab(name)
        reader.wait(lambda: reader.js(nameless) == [])
    panels = """return [...document.querySelectorAll("[role=tab]")].map((one) =>
      document.getElementById(one.getAttribute("aria-controls")).getAttribute("aria-labelledby"))"""
    assert reader.js(panels) == [f"tab-{name}" for name in TABS]


def test_dark_and_light(reader, one):
    shade = "return getComputedStyle(document.body).backgroundColor"
    for scheme, dark in (("light", False), ("dark", True)):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        reader.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        reader.open(one)
        assert (sum(map(int, reader.js(shade)[4:-1].split(","))) < 200) == dark
    button = reader.one("#theme")
    button.click()
    assert "light" in button.text and sum(map(int, reader.js(shade)[4:-1].split(","))) > 600
    button.click()
    assert "dark" in button.get_attribute("aria-label")
    button.click()
    reader.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert reader.problems() == []


def test_several_runs_stand_side_by_side(reader, two):
    reader.open(two)
    panel = reader.text("#panel-overview")
    assert "baseline" in panel and "faster" in panel and "Settings that differ" in panel
    legend = partial(reader.text, "#panel-overview .card .legend")
    reader.wait(lambda: "faster" in legend())
    reader.labelled("baseline").click()
    reader.wait(lambda: "baseline" not in legend())
    reader.tab("settings")
    first = reader.js(
        "return [...document.querySelectorAll('#panel-settings tbody tr')].slice(0, 3).map((row) => row.innerText)"
    )
    assert "differs" in first[0] and "differs" in first[1] and "differs" not in first[2]
    assert "1e-6" in first[0] and "3e-6" in first[0]
    reader.tab("samples")
    reader.wait(lambda: reader.count().startswith("60 of"))
    reader.choose("run", "faster")
    reader.wait(lambda: reader.count().startswith("40 of"))
    assert reader.problems() == []


def planted(value):
    """The same with markup and scripts in every text, names included."""
    if isinstance(value, str):
        return value + PLANTED
    if isinstance(value, dict):
        kept = {"name", "directory", "command", "state"}
        return {name: planted(each) if name not in kept else each + PLANTED for name, each in value.items()}
    return [planted(each) for each in value] if isinstance(value, list) else value


def planted_run():
    run = planted(make_run(samples=24, rollouts=6))
    for kind, curves in run["curves"].items():
        curves["series"] = {name + PLANTED: values for name, values in curves["series"].items()}
        for chart in run["charts"]:
            if chart["kind"].startswith(kind):
                chart["kind"] = kind
    run["ledger"]["dropped"] = {PLANTED: 12}
    for sample in run["samples"]:
        sample["rewards"] = {PLANTED: 1.0}
        sample["metadata"] = {PLANTED: PLANTED}
    for row in run["evals"]:
        row["metrics"] = {PLANTED: 0.5}
    return run


def test_nothing_of_a_run_is_executed(reader, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page(make_data(planted_run(), planted_run() | {"name": f"second{PLANTED}"})), encoding="utf-8")
    reader.open(path.as_uri())
    for name in TABS:
        reader.tab(name)
        reader.shows(f"#panel-{name}", "onerror=")
    reader.tab("curves")
    reader.labelled("pick all listed").click()
    reader.tab("samples")
    reader.labelled("next").click()
    reader.wait(lambda: "Sample" in reader.text(".detail"))
    reader.one(".tokens").send_keys(Keys.HOME)
    reader.one("#panel-time canvas")
    reader.tab("time")
    reader.one("#panel-time canvas").send_keys(Keys.ARROW_RIGHT)
    reader.shows("#panel-time .said", "onerror=")
    found = reader.js("return document.querySelectorAll('img, iframe, object, main script, main a, main svg').length")
    assert found == 0
    assert reader.js("return window.planted") is None
    assert reader.problems() == [] and reader.requests() == []


def test_the_policy_stops_what_would_get_in(reader, one):
    """Even markup inserted on purpose runs nothing and loads nothing."""
    reader.open(one)
    reader.js(
        """const box = document.createElement("div");
        box.innerHTML = `<img src="missing.png" onerror="window.planted = 1">
          <a id="link" href="javascript:window.planted = 1">a</a>`;
        document.body.append(box);
        const script = document.createElement("script");
        script.textContent = "window.planted = 1";
        document.body.append(script);
        document.getElementById("link").click();"""
    )
    reader.wait(lambda: len(blocked := reader.problems()) >= 1 and "Content Security Policy" in " ".join(blocked))
    assert reader.js("return window.planted") is None


@contextmanager
def served(current):
    """A server on this host that gives a page and its data as they are now."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            live = json.dumps(current["data"]).encode()
            body = live if self.path == "/data.json" else page(current["data"]).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json" if self.path == "/data.json" else "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()


def test_a_live_run_is_followed_and_choices_stay(reader):
    current = {"data": make_data(make_run(rollouts=5, samples=20), live=True)}
    with served(current) as address:
        reader.open(address)
        reader.shows("#panel-overview", "5 of 5")
        reader.tab("samples")
        reader.choose("status", "truncated")
        reader.wait(lambda: reader.count().startswith("2 of 20"))
        reader.labelled("next").click()
        reader.wait(lambda: "Sample 6" in reader.text(".detail"))
        reader.choose("colour by", "version")
        current["data"] = make_data(make_run(rollouts=6, samples=28), live=True)
        reader.wait(lambda: reader.count().startswith("4 of 28"))
        reader.shows(".detail", "Sample 6")
        assert reader.labelled("colour by").get_attribute("value") == "version"
        assert reader.text("#live") == "live"
        reader.tab("overview")
        reader.shows("#panel-overview", "6 of 6")
        assert all(each.startswith(address) for each in reader.requests())
        current["data"] = make_data(make_run(rollouts=7, samples=28), live=False)
        reader.wait(lambda: "7 of 7" in reader.text("#panel-overview"))
        reader.wait(lambda: reader.text("#live") == "")
        assert reader.problems() == []


def test_the_address_that_is_printed_shows_a_live_run(reader, tmp_path):
    tracker = Tracker(tmp_path, tensorboard=False)
    tracker.log("rollout", step=0, rollout_id=0, metrics={"rollout/raw_reward": 0.5})
    words = [sys.executable, "-P", "-m", "slime_launch.cli", "report", str(tmp_path), "--serve"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = re.search(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", process.stdout.readline())[0]
            reader.open(address)
            reader.wait(lambda: reader.text("#live") == "live")
            reader.driver.get(address.partition("?")[0])
            assert "give the whole address that slime-launch report --serve has printed" in reader.text("body")
        finally:
            process.terminate()
            tracker.close()
