"""What somebody does with an open report, in a browser. Selenium has to be installed."""

import json

from selenium.common.exceptions import TimeoutException
from selenium.webdriver.support.ui import Select, WebDriverWait

SECONDS = 30


class Reader:
    """What somebody does with an open report."""

    def __init__(self, driver):
        self.driver = driver
        self.js = driver.execute_script

    def open(self, address):
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(address)
        self.wait(lambda: self.js("return document.body.dataset.ready") == "true")

    def wait(self, what):
        return WebDriverWait(self.driver, SECONDS, poll_frequency=0.05).until(lambda _: what())

    def one(self, selector):
        return self.wait(lambda: self.js("return document.querySelector(arguments[0])", selector))

    def text(self, selector):
        return self.js("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def shows(self, selector, words):
        """Wait until the text is there: tables are filled in after their tab opens."""
        try:
            self.wait(lambda: words in self.text(selector))
        except TimeoutException:
            raise AssertionError(f"{words!r} is not in {self.text(selector)!r}") from None

    def tab(self, name):
        self.one(f"#tab-{name}").click()
        self.wait(
            lambda: self.js("return document.querySelector(arguments[0]).childElementCount > 0", f"#panel-{name}")
        )
        self.wait(lambda: self.one(f"#tab-{name}").get_attribute("aria-selected") == "true")

    def labelled(self, words, within="body"):
        """The control that these words name, as a screen reader finds it."""
        return self.js(
            """const [words, within] = arguments;
            const name = (one) => one.getAttribute("aria-label") ?? one.labels?.[0]?.innerText ?? one.innerText;
            return [...document.querySelector(within).querySelectorAll("input, select, button")]
              .find((one) => name(one).trim().startsWith(words));""",
            words, within,
        )  # fmt: skip

    def choose(self, words, text):
        Select(self.labelled(words)).select_by_visible_text(text)

    def count(self):
        return self.text("#panel-samples [role=status]")

    def problems(self):
        """What the browser complains of, and what the page says failed."""
        found = [row["message"] for row in self.driver.get_log("browser") if row["level"] in ("SEVERE", "WARNING")]
        return found + [text for text in [self.text("#problem")] if text]

    def requests(self):
        """Addresses asked for since the page was opened, but for the page itself."""
        events = (json.loads(row["message"])["message"] for row in self.driver.get_log("performance"))
        asked = (each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent")
        return [each for each in asked if not each.startswith(("file:", "data:", "blob:", "about:"))]
