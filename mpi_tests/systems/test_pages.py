"""The pages of a benchmark, a training run and a plan, in a browser: nothing is cut off, missing or unreadable."""

import re

import pytest

from mpi_tests.helpers.browser import browser, console, each_window, needs_chromium, open_file, overflow
from mpi_tests.helpers.launch import launch, refusal
from parallelism.planner import __main__ as planner

pytestmark = [pytest.mark.shares_cores, needs_chromium]
SMALL = "--max_iters 6 --eval_interval 3 --n_layer 2 --n_head 2 --n_embd 16 --block_size 8 --micro_batch_size 2"
SMALL += " --sample_tokens 2 --val_fraction 0.002 --pp 2 --num_micro_batches 2"
LEAST_CONTRAST = 4.5  # contrast of text: WCAG 2.2, success criterion 1.4.3


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    sizes = ["-b", "64", "-e", "64K", "-f", "8", "-n", "5", "-w", "1", "--peers", "mpi"]
    bench, training = folder / "bench.html", folder / "training.html"
    for command in (
        ["-m", "collectives.bench", "all_reduce", "-A", "all", *sizes, "--html", bench],
        ["train.py", *SMALL.split(), "--out_dir", folder / "out", "--report", training],
    ):
        result = launch(2, "python", *command)
        assert result.returncode == 0, result.stderr
    plan = folder / "plan.html"
    assert planner.main(["--config", "small", "--hosts", "2", "--up_to", "64", "--html", str(plan)]) == 0
    return {"bench": bench, "training": training, "plan": plan}


@each_window
@pytest.mark.parametrize("name", ["bench", "training", "plan"])
def test_a_page_fits_and_can_be_read(pages, name, width, dark):
    with browser(width, dark=dark) as driver:
        show(driver, pages[name])
        assert console(driver) == []
        assert overflow(driver) <= 0
        cut = driver.execute_script(
            "return [...document.querySelectorAll('svg text')]"
            ".map((text) => [text.textContent, text.getBoundingClientRect()])"
            ".filter(([text, box]) => box.left < 0 || box.right > innerWidth)"
        )
        assert cut == []
        low = {pair: value for pair, value in contrasts(driver).items() if value < LEAST_CONTRAST}
        assert low == {}
        assert (luminance(color_of(driver, "body", "backgroundColor")) < 0.1) == dark


def test_every_chart_is_drawn_again_at_another_width(pages):
    with browser(1600) as driver:
        for page in pages.values():
            show(driver, page)
            wide = widths(driver)
            driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": False},
            )
            wait_until(driver, "return document.querySelector('svg').viewBox.baseVal.width < 400")
            assert len(widths(driver)) == len(wide) > 1
            assert max(widths(driver)) < 400 <= min(wide)
            driver.set_window_size(1600, 1000)
            driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        assert console(driver) == []


def test_a_click_on_a_heading_sorts_the_table(pages):
    with browser() as driver:
        show(driver, pages["bench"])
        buttons = driver.find_elements("css selector", "#t0 th button")
        names = [button.text for button in buttons]
        for name in ("median, µs", "size", "name"):
            column = names.index(name)
            before = cells(driver, column)
            buttons[column].click()
            assert cells(driver, column) == sorted(before)
            assert buttons[column].find_element("xpath", "..").get_attribute("aria-sort") == "ascending"
            buttons[column].click()
            assert cells(driver, column) == sorted(before, reverse=True)
            assert len(driver.find_elements("css selector", "#t0 th[aria-sort]")) == 1


def test_the_nearest_size_is_told_under_the_pointer(pages):
    from selenium.webdriver import ActionChains

    with browser() as driver:
        show(driver, pages["bench"])
        ActionChains(driver).move_to_element(driver.find_element("css selector", "figure svg")).perform()
        tip = driver.find_element("css selector", ".tip").text
        assert re.match(r"size \d+ (B|KiB)\n", tip)
        assert "mpi" in tip


def test_lines_are_switched_off_in_all_charts_of_a_table(pages):
    names = "return [...document.querySelectorAll(`#s0 figure:nth-of-type(${arguments[0]}) svg text > title`)]"
    names += ".map((title) => title.textContent)"
    with browser() as driver:
        show(driver, pages["bench"])

        def labels(figure):
            return {*driver.execute_script(names, figure)}

        def switch(figure, name):
            driver.find_element(
                "css selector", f"#s0 figure:nth-of-type({figure}) .switches input[name='{name}']"
            ).click()

        every = labels(1)
        assert {"mpi", "ring", "limit"} <= every
        lines = len(driver.find_elements("css selector", "#s0 figure:nth-of-type(1) svg .line"))
        switch(1, "ring")
        assert (labels(1), labels(2)) == (every - {"ring"}, every - {"ring"})
        assert len(driver.find_elements("css selector", "#s0 figure:nth-of-type(1) svg .line")) == lines - 2
        switch(2, "ring")
        assert labels(1) == every
        switch(1, "")
        assert labels(1) == labels(2) == set()
        switch(2, "mpi")
        assert labels(1) == labels(2) == {"mpi"}
        switch(2, "")
        assert labels(1) == labels(2) == every
        assert console(driver) == []


@pytest.mark.parametrize("name", ["--report", "--prometheus"])
def test_a_file_that_cannot_be_written_ends_a_run_before_it_begins(tmp_path, name):
    result = launch(
        2, "python", "train.py", *SMALL.split(), "--out_dir", tmp_path / "out", name, tmp_path / "none" / "x"
    )
    why = "can't be written (No such file or directory): pass a path in an existing, writable folder"
    assert f"{name[2:]}={tmp_path}/none/x {why}" in refusal(result)
    assert "iter 1" not in result.stdout


def test_a_report_may_lie_in_the_folder_that_the_run_makes(tmp_path):
    out = tmp_path / "out"
    files = "--report", out / "report.html", "--prometheus", out / "run.prom"
    assert launch(2, "python", "train.py", *SMALL.split(), "--out_dir", out, *files).returncode == 0
    assert "training_steps_total" in (out / "run.prom").read_text()
    assert (out / "report.html").stat().st_size < 500_000


def show(driver, page):
    """Open a page, and wait until all charts with data are drawn."""
    open_file(driver, page)
    wait_until(driver, "return [...document.querySelectorAll('figure')].every((each) => each.querySelector('svg'))")


def wait_until(driver, script):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, 20).until(lambda it: it.execute_script(script))


def widths(driver):
    return driver.execute_script(
        "return [...document.querySelectorAll('svg')].map((each) => each.viewBox.baseVal.width)"
    )


def cells(driver, column):
    values = driver.execute_script(
        "return [...document.querySelectorAll(`#t0 tbody tr`)]"
        ".map((row) => row.cells[arguments[0]]).map((cell) => cell.dataset.v ?? cell.textContent)",
        column,
    )
    return [float(value) if re.fullmatch(r"[\d.e-]+", value) else value for value in values]


def color_of(driver, selector, name):
    return driver.execute_script(
        "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]", selector, name
    )


def contrasts(driver):
    """Return the contrast of every pair of a text's color and its background."""
    on_page = ("body", "p", "a", "caption", "td", "svg text", "svg .soft")
    paper = color_of(driver, "body", "backgroundColor")
    pairs = {each: (color_of(driver, each, "fill" if "svg" in each else "color"), paper) for each in on_page}
    pairs["th"] = color_of(driver, "th button", "color"), color_of(driver, "th", "backgroundColor")
    on_color = driver.execute_script(
        "const probe = document.body.appendChild(document.createElement('p')), style = getComputedStyle(probe);"
        "const shown = (name) => { probe.style.color = `var(--${name})`; return style.color; };"
        "return Array.from({length: 12}, (_, i) => [shown('on'), shown(`c${i}`)])"
    )
    pairs |= {f"on color {i}": tuple(each) for i, each in enumerate(on_color)}
    return {name: contrast(*map(luminance, pair)) for name, pair in pairs.items()}


def luminance(color):
    """Return a color's relative luminance as defined by WCAG 2.2."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(first, second):
    return (max(first, second) + 0.05) / (min(first, second) + 0.05)
