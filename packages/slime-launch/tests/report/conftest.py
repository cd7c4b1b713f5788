"""Chromium without a window; tests that need one are skipped where it, its driver or selenium is missing."""

import shutil

import pytest


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
