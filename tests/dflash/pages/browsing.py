"""A headless Chromium for tests: Debian's packages chromium and chromium-driver, spoken to by selenium."""

import shutil
from pathlib import Path
from typing import Any

SCREENSHOTS = Path(__file__).parents[3] / "build" / "screenshots"
"""Where the tests leave what they saw."""


def why_no_browser() -> str | None:
    """What is missing for a browser; None where nothing is."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if missing:
        return f"no {' and no '.join(missing)} here: `make test-system` as root"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed here: `make venv` brings it"
    return None


class Browser:
    """One Chromium. What its console says is kept and asked for at the end of every look at a page."""

    def __init__(self) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.options import Options
        from selenium.webdriver.chrome.service import Service

        options = Options()
        options.binary_location = shutil.which("chromium")
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--lang=en"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        self.resize(1280)

    def resize(self, width: int, height: int = 900) -> None:
        """Make the window ``width`` CSS pixels wide, as a telephone under 500."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def dark(self, dark: bool) -> None:
        """What the system asks pages to be."""
        wanted = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})

    def open(self, page: Path, fragment: str = "") -> None:
        """Open a file; a fragment names a place in it."""
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get(page.resolve().as_uri() + fragment)

    def js(self, code: str, *arguments: Any) -> Any:
        """What ``return code`` gives in the page."""
        return self.driver.execute_script(f"return ({code})", *arguments)

    def do(self, code: str, *arguments: Any) -> None:
        """Run statements in the page."""
        self.driver.execute_script(code, *arguments)

    def text(self, selector: str) -> str:
        """The text of the one element that ``selector`` finds."""
        (found,) = self.texts(selector)
        return found

    def texts(self, selector: str) -> list[str]:
        """The text of each element that ``selector`` finds, as it is in the page, spaces at its ends left out."""
        found: list[str] = self.js(
            "[...document.querySelectorAll(arguments[0])].map(e => e.textContent.trim())", selector
        )
        return found

    def table(self, selector: str) -> list[list[str]]:
        """The rows below the head of the table in the element that ``selector`` finds."""
        rows: list[list[str]] = self.js(
            "[...document.querySelector(arguments[0]).querySelectorAll('tbody tr')]"
            ".map(row => [...row.children].map(cell => cell.textContent.trim()))",
            selector,
        )
        return rows

    def press(self, selector: str, *keys: str) -> None:
        """Focus the element and press keys there, named as selenium names them or characters."""
        from selenium.webdriver.common.keys import Keys

        element = self.driver.find_element("css selector", selector)
        self.do("arguments[0].focus()", element)
        for key in keys:
            self.driver.switch_to.active_element.send_keys(getattr(Keys, key, key))

    def screenshot(self, name: str) -> Path:
        """The whole page as a picture among the others."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        width = self.js("innerWidth")
        self.resize(width, min(12_000, self.js("document.documentElement.scrollHeight")))
        self.driver.save_screenshot(str(path))
        self.resize(width)
        return path

    def require_quiet(self) -> None:
        """Fail on anything that the page wrote to the console, or that the browser refused it."""
        said = [entry["message"] for entry in self.driver.get_log("browser")]
        assert said == []

    def close(self) -> None:
        self.driver.quit()
