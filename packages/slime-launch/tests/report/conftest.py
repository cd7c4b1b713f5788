"""Chromium without a window; tests that need one are skipped where it, its driver or selenium is missing."""

import shutil

import pytest

from slime_launch.report.page import page
from support.made_runs import make_data, make_run


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install selenium")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    chromedriver = shutil.which("chromedriver")
    if browser is None or chromedriver is None:
        pytest.skip("no Chromium with its driver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    profile = tmp_path_factory.mktemp("profile")
    for word in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1360,900",
        "--disable-background-networking", "--no-first-run", f"--user-data-dir={profile}",
    ):  # fmt: skip
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture
def reader(chromium):
    from support.report_reader import Reader  # which imports selenium

    return Reader(chromium)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A page of one run."""
    path = tmp_path_factory.mktemp("one") / "report.html"
    path.write_text(page(make_data(make_run(samples=120))), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    path = tmp_path_factory.mktemp("two") / "report.html"
    runs = make_run("baseline"), make_run("faster", seed=1, samples=40)
    path.write_text(page(make_data(*runs)), encoding="utf-8")
    return path.as_uri()
