"""The report page of a long run: seconds to write it, its size, and seconds until a browser shows it.

The run is made up: 1,000 rollouts of 512 samples. 3,000 samples are shown, 250 tokens each on average; 23 series,
nine lanes with 27,000 entries. The browser is Chromium without a window, on a fresh profile; it is left out where
Chromium, its driver or selenium is missing. "Opens" is from the request to the drawn overview; "opens a sample" is a
link into the sample browser, tokens coloured.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from _records import Record

from slime_launch.report.page import page

MADE_RUNS = Path(__file__).resolve().parents[1] / "packages" / "slime-launch" / "tests" / "report"
SECONDS = 60.0


def main(out: Path, *, quick: bool) -> list[Record]:
    """Write the page and open it.

    Args:
        out: Where the page goes.
        quick: A tenth of the run.
    """
    sys.path.insert(0, str(MADE_RUNS))
    made = importlib.import_module("made_runs")
    part = 10 if quick else 1
    data = made.make_data(made.make_run(rollouts=1000 // part, samples=3000 // part, length=250))
    start = time.perf_counter()
    text = page(data)
    seconds = time.perf_counter() - start
    path = out / "report.html"
    path.write_text(text, encoding="utf-8")
    case = f"{1000 // part} rollouts, {3000 // part} samples shown"
    records = [
        Record(case, "write", seconds, "s", more_is_better=False),
        Record(case, "size", path.stat().st_size / 1e6, "MB", more_is_better=False, goal=10.0),
    ]
    driver = browser(out / "profile")
    if driver is None:
        print("no Chromium, or no driver, or no selenium: opening is not measured")
        return records
    try:
        seconds_to(driver, path.as_uri(), "document.body.dataset.ready")  # starts the browser's processes
        opens = {
            "opens": ("", "document.querySelector('#panel-overview canvas')"),
            "opens the timeline": ("#time", "document.querySelector('#panel-time canvas')?.width > 400"),
            "opens a sample": (
                "#samples?rollout=0&index=1",
                "document.querySelector('.tokens span')?.style.background",
            ),
        }
        for metric, (end, shown) in opens.items():
            least = min(seconds_to(driver, path.as_uri() + end, shown) for _ in range(3))
            records.append(Record(case, metric, least, "s", more_is_better=False, goal=2.0))
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
        if time.perf_counter() - start > SECONDS:
            raise TimeoutError(f"{address} did not open within {SECONDS:.0f} s")
        time.sleep(0.01)
    return time.perf_counter() - start
