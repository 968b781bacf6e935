"""Open a page in headless Chromium, and read what it logs."""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

CHROMIUM = shutil.which("chromium")
CHROMEDRIVER = shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(not (CHROMIUM and CHROMEDRIVER), reason="needs Debian's chromium, chromium-driver")
each_window = pytest.mark.parametrize(
    ("width", "dark"),
    [
        (400, False),
        (1600, True),
        pytest.param(400, True, marks=pytest.mark.proof),
        pytest.param(1600, False, marks=pytest.mark.proof),
    ],
)


@cache
def chromium() -> webdriver.Chrome:
    """Start the browser of this process, whose start takes longer than most tests with it."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    atexit.register(end)
    return webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))


def end() -> None:
    """End the process's browser, if it has one."""
    if chromium.cache_info().currsize:
        chromium().quit()
        chromium.cache_clear()


@contextmanager
def browser(width: int = 1600, height: int = 1000, dark: bool = False) -> Iterator[webdriver.Chrome]:
    """Yield the browser at a new window with a viewport of `width` x `height` CSS pixels, without a network."""
    driver = chromium()
    first = driver.current_window_handle
    driver.switch_to.new_window("window")
    try:
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]},
        )
        driver.execute_cdp_cmd(
            "Network.emulateNetworkConditions",
            {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1},
        )
        yield driver
    finally:
        driver.close()
        driver.switch_to.window(first)


def open_file(driver: webdriver.Chrome, path: Path) -> None:
    """Open `path` as a file."""
    driver.get(path.resolve().as_uri())


def console(driver: webdriver.Chrome) -> list[str]:
    """Return what the page logged since the last look: errors, warnings and messages."""
    return [f"{entry['level']}: {entry['message']}" for entry in driver.get_log("browser")]


def overflow(driver: webdriver.Chrome) -> int:
    """Return by how many CSS pixels the page is wider than its viewport."""
    return driver.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
