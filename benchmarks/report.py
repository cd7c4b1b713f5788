"""`slime-launch report`: the page of 1,000 steps of 512 samples and of ten times as many, in a browser, and live.

The run's files are made up, with what a run on 16 ranks writes: about 40 metrics of each step, the spans of the loop
and of the ranks, and the first 8 samples of each rollout with 300 tokens each. Seconds are wall time of the whole
command, start of the interpreter included. `opens` is from the browser's request to the drawn overview, and `opens a
sample` a link into the sample browser, tokens colored; the browser is Chromium without a window on a fresh profile,
left out where Chromium, its driver or selenium is missing. `--serve` is its CPU time over wall time, as a share of one
core, while a step is added every two seconds and a page asks as a browser does: a run has a core busy at least.
"""

from __future__ import annotations

import gzip
import importlib
import json
import random
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _extra_packages import extra_packages
from _records import Record

STEPS, QUICK_STEPS, FACTOR = 1000, 100, 10
SHOWN, TOKENS, RANKS = 8, 300, 16
STEP_SECONDS = 60.0
SECONDS_GOAL, MIB_GOAL, OPEN_GOAL, SHARE_GOAL = 5.0, 10.0, 2.0, 1.0
SERVED_SECONDS, QUICK_SERVED_SECONDS, POLL_SECONDS = 240.0, 6.0, 2.0
OPEN_LIMIT = 60.0
WORDS = ("the", "sum", "of", "two", "numbers", "is", "carry", "one", "so", "we", "get", "therefore", "check", "again")
SHOWS = {
    "opens": ("", "document.querySelector('#panel-overview canvas')"),
    "opens the timeline": ("#time", "document.querySelector('#panel-time canvas')?.width > 400"),
    "opens a sample": ("#samples?rollout=0&index=1", "document.querySelector('.tokens span')?.style.background"),
}
"""What is measured: the end of the page's address, and what is true when it is there."""


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure all of it.

    Args:
        out: Where the runs' files go.
        quick: A tenth of the steps, and 6 seconds of `--serve`.
    """
    sys.path.append(str(extra_packages("report")))
    steps = QUICK_STEPS if quick else STEPS
    figures = {}
    for count in (steps, FACTOR * steps):
        directory = make_run(out / str(count), count)
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "slime_launch.cli", "report", str(directory)], check=True)
        size = (directory / "report.html").stat().st_size / 2**20
        figures[count] = (time.perf_counter() - start, size)
    (seconds, size), (longer, larger) = figures.values()
    case = f"{steps:,} steps"
    return [
        Record(case, "time", seconds, "s", False, SECONDS_GOAL),
        Record(case, "size", size, "MiB", False, MIB_GOAL),
        Record(f"{FACTOR} times as long", "time", longer / seconds, "times", False, float(FACTOR)),
        Record(f"{FACTOR} times as long", "size", larger / size, "times", False, float(FACTOR)),
        *in_browser(case, out / str(steps) / "report.html", out / "profile"),
        Record(case, "--serve", 100 * served(out / str(steps), steps, quick=quick), "%", False, SHARE_GOAL),
    ]


def served(directory: Path, steps: int, *, quick: bool) -> float:
    """CPU time of `--serve` over wall time, after its start, while the run goes on."""
    words = [sys.executable, "-m", "slime_launch.cli", "report", str(directory), "--serve"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    dice, tag = random.Random(8), ""
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        if found is None:
            raise RuntimeError("report --serve did not say where it is")
        watched = importlib.import_module("psutil").Process(process.pid)
        began, before = time.perf_counter(), sum(watched.cpu_times()[:2])
        changes = 0
        while time.perf_counter() - began < (QUICK_SERVED_SECONDS if quick else SERVED_SECONDS):
            with (directory / "metrics.jsonl").open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows(steps, dice))
            write_samples(directory / "samples", steps, dice)
            steps += 1
            request = urllib.request.Request(found[0].replace("/?", "/data.json?"), headers={"If-None-Match": tag})
            try:
                with urllib.request.urlopen(request, timeout=OPEN_LIMIT) as answer:
                    answer.read()
                    changes, tag = changes + 1, answer.headers["ETag"]
            except urllib.error.HTTPError as error:
                if error.code != 304:
                    raise
            time.sleep(POLL_SECONDS)
        share: float = (sum(watched.cpu_times()[:2]) - before) / (time.perf_counter() - began)
        print(f"--serve: {changes} times new data", flush=True)
        return share
    finally:
        process.terminate()
        process.wait(OPEN_LIMIT)


def in_browser(case: str, path: Path, profile: Path) -> list[Record]:
    """Seconds until a browser shows a page, the fastest of three."""
    driver = browser(profile)
    if driver is None:
        print("no Chromium, or no driver, or no selenium: opening is not measured")
        return []
    records = []
    try:
        seconds_to(driver, path.as_uri(), "true")  # starts the browser's processes
        for metric, (end, shown) in SHOWS.items():
            least = min(seconds_to(driver, path.as_uri() + end, shown) for _ in range(3))
            records.append(Record(case, metric, least, "s", more_is_better=False, goal=OPEN_GOAL))
    finally:
        driver.quit()
    return records


def browser(profile: Path) -> Any:
    """Chromium without a window, or `None`."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    try:
        webdriver = importlib.import_module("selenium.webdriver")
    except ImportError:
        return None
    if program is None or driver is None:
        return None
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1360,900",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(word)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


def seconds_to(driver: Any, address: str, shown: str) -> float:
    """Seconds from asking for a page until an expression in it is true."""
    driver.get("about:blank")
    start = time.perf_counter()
    driver.get(address)
    while not driver.execute_script(f"return document.body.dataset.ready && {shown}"):
        if time.perf_counter() - start > OPEN_LIMIT:
            raise TimeoutError(f"{address} did not open within {OPEN_LIMIT:.0f} s")
        time.sleep(0.01)
    return time.perf_counter() - start


def make_run(directory: Path, steps: int) -> Path:
    """The files of a run of so many steps."""
    (directory / "samples").mkdir(parents=True)
    dice = random.Random(7)
    settings = {f"setting_{number}": {"value": number, "origin": "default"} for number in range(400)}
    settings["num_rollout"] = {"value": steps, "origin": "command line"}
    (directory / "settings.json").write_text(json.dumps({"settings": settings}))
    with (directory / "metrics.jsonl").open("w") as file:
        for step in range(steps):
            file.writelines(json.dumps(row) + "\n" for row in rows(step, dice))
            write_samples(directory / "samples", step, dice)
    return directory


def rows(step: int, dice: random.Random) -> Iterator[dict[str, Any]]:
    """The lines of a step in `metrics.jsonl`."""
    now = 1.7e9 + STEP_SECONDS * step
    head = {"step": step, "rollout_id": step, "time": now + STEP_SECONDS}
    train = (
        "loss",
        "pg_loss",
        "kl_loss",
        "grad_norm",
        "lr",
        "ppo_kl",
        "entropy_loss",
        "train_rollout_logprob_abs_diff",
    )
    yield {"kind": "train", **head, **{f"train/{name}": dice.gauss(0.1, 0.02) for name in train}}
    rollout = {f"rollout/number_{number}": dice.gauss(1, 0.1) for number in range(28)}
    reward = {
        "rollout/raw_reward": dice.random(),
        "perf/step_time": STEP_SECONDS,
        "perf/wait_time_ratio": dice.random(),
    }
    yield {"kind": "rollout", **head, **rollout, **reward}
    loop = [("generate", now, 35), ("train", now + 35, 20), ("send", now + 55, 3)]
    ranks = [("ref_log_probs", now + 35, 5), ("forward_backward", now + 40, 14), ("optimizer", now + 54, 1)]
    yield {"kind": "timeline", **head, "spans": {"loop": loop, **{f"rank {rank}": ranks for rank in range(RANKS)}}}
    if step % 20 == 0:
        yield {"kind": "eval", **head, "eval/aime": dice.random(), "eval/aime/stderr": 0.02}


def write_samples(directory: Path, rollout: int, dice: random.Random) -> None:
    """The samples that a rollout keeps, and what a rank computed for them."""
    kept, computed = [], {}
    for number in range(SHOWN):
        log_probs = [round(-dice.expovariate(3), 4) for _ in range(TOKENS)]
        texts = [" " + dice.choice(WORDS) for _ in range(TOKENS)]
        index = 512 * rollout + number
        sample: dict[str, Any] = {"rollout": rollout, "weight_version": rollout, "index": index, "group": index // 8}
        sample |= {"trajectory": index, "prompt": " ".join(dice.choices(WORDS, k=60)), "label": "42", "dropped": None}
        sample |= {"reward": float(dice.random() < 0.5), "rewards": None, "status": "completed", "failure": None}
        sample |= {"length": TOKENS, "cut": None, "tokens": texts, "mask": None, "versions": [rollout] * TOKENS}
        kept.append(sample | {"log_probs": log_probs, "metadata": {}})
        computed[index] = {
            "train_log_probs": [round(value + dice.gauss(0, 0.01), 4) for value in log_probs],
            "advantages": [dice.choice((-1.0, 1.0))] * TOKENS,
        }
    for suffix, value in (("", kept), ("-rank_0", computed)):
        path = directory / f"rollout_{rollout:07d}{suffix}.json.gz"
        path.write_bytes(gzip.compress(json.dumps(value).encode(), compresslevel=3))
