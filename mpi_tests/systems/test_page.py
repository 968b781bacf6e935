"""The page that steps through schedules, in Chromium: it shows the states of the prover and the planner's prices."""

import json
import random
import re
import time
from contextlib import contextmanager

import pytest
from PIL import Image, ImageChops
from selenium.webdriver.support.ui import Select

from collectives.algorithms import REGISTRY, find
from collectives.schedule.cost import predict
from collectives.schedule.fabrics import FABRICS
from collectives.schedule.moves import render
from mpi_tests.helpers import page as reference
from mpi_tests.helpers.browser import browser, console, each_window, needs_chromium, open_file, overflow
from mpi_tests.helpers.documents import checkout, command_with, run
from mpi_tests.helpers.launch import ROOT
from parallelism.pipeline.schedule import registry
from parallelism.pipeline.schedule.actions import num_alive
from parallelism.pipeline.schedule.price import Costs, price
from parallelism.step.actions import parse
from teaching.page.scenes import attention, zero
from teaching.page.scenes.collectives import LENGTHS

pytestmark = [pytest.mark.shares_cores, needs_chromium]

MOST_BYTES = 700_000
SCENES = ("collectives", "pipelines", "attention", "zero")
AT_COLLECTIVES = "scene=collectives&collective={}&algorithm={}&ranks={}&hosts={}&step=0"
KEYS = {"ArrowRight": "\ue014", "ArrowLeft": "\ue012", "Home": "\ue011", "End": "\ue010", "space": " "}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Return the page that the guide's command writes."""
    folder = checkout(tmp_path_factory.mktemp("page"))
    command = command_with("python -m teaching.page")
    assert "without a network" in run(command, folder).stdout
    return folder / command.rpartition(" ")[2]


def test_the_file_is_small_and_whole(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) <= MOST_BYTES
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)|@import|url\((?!#)|fetch\(", text)  # it loads no other files
    names = re.findall(r'id="data-([^"]+)"', text)
    assert {f"collectives.{row.collective}.{row.name}" for row in REGISTRY} < set(names)
    assert {name.partition(".")[0] for name in names} == {"collectives", "pipelines", "attention", "zero"}
    assert "<!-- " not in text.replace("<!-- data", "")


@contextmanager
def opened(path, **window):
    """Yield a browser with the page at its first scene, and check at the end that the page logged no error."""
    with browser(**window) as driver:
        driver.set_script_timeout(120)
        open_file(driver, path)
        wait(driver, "scene=collectives")
        yield driver
        assert console(driver) == []


@pytest.fixture(scope="module")
def driver(path):
    with opened(path) as driver:
        yield driver


def wait(driver, *parts):
    """Wait until the page shows a scene with these choices."""
    until = time.monotonic() + 30
    while True:
        state = driver.execute_script("return document.body.dataset.shown") or ""
        if all(part in state.replace("#", "&").split("&") for part in parts):
            return
        assert time.monotonic() < until, f"the page shows {state}, not {parts}"
        time.sleep(0.05)


def visit(driver, address):
    driver.execute_script("location.hash = arguments[0]", address)
    wait(driver, *address.split("&"))


def press(driver, *names):
    for name in names:
        driver.switch_to.active_element.send_keys(KEYS[name])


def click(driver, selector):
    driver.find_element("css selector", selector).click()


def shown_state(driver):
    """Return the values of all cells, in the format of `prover_states`."""
    cells = driver.execute_script(
        "return [...document.querySelectorAll('#board [data-chunk]')].map(c => "
        "[Number(c.dataset.rank), Number(c.dataset.chunk), c.dataset.value])"
    )
    vectors = {}
    for rank, chunk, value in cells:
        chunk_of_value, _, ranks = value.partition(":")
        number = int(chunk_of_value) << 16 | sum(1 << int(r) for r in ranks.split(",")) if value else -1
        vectors.setdefault(rank, []).append((chunk, number))
    return ";".join(trimmed(vectors[rank]) for rank in sorted(vectors))


def trimmed(cells):
    numbers = [number for _, number in sorted(cells)]
    while numbers and numbers[-1] < 0:
        numbers.pop()
    return " ".join(map(str, numbers))


def ask(driver, call, *arguments):
    """Call an asynchronous function of the page, and return its result."""
    script = f"const done = arguments[arguments.length - 1]; {call}(...arguments).then(done, e => done(String(e)))"
    return driver.execute_async_script(script, *arguments)


@pytest.mark.parametrize(
    ("collective", "name", "size", "hosts"),
    [
        ("all_reduce", "ring", 4, 1),
        ("all_reduce", "hierarchical", 16, 4),
        ("all_to_all", "leaders", 7, 2),
        ("reduce", "direct", 5, 1),
        ("exscan", "recursive_doubling", 6, 1),
        ("barrier", "dissemination", 3, 1),
        ("broadcast", "binomial", 1, 1),
    ],
)
def test_each_step_shows_the_prover_s_state(driver, collective, name, size, hosts):
    row = find(collective, name)
    visit(driver, AT_COLLECTIVES.format(collective, name, size, hosts))
    states = reference.prover_states(row, size, hosts)
    for number, state in enumerate(states):
        assert shown_state(driver) == state
        assert driver.find_element("id", "position").get_attribute("value") == str(number)
        press(driver, "ArrowRight")
    assert shown_state(driver) == states[-1]
    press(driver, "Home")
    assert shown_state(driver) == states[0]


def test_keyboard_and_mouse_step_alike(driver):
    visit(driver, AT_COLLECTIVES.format("all_gather", "ring", 5, 1))
    states = reference.prover_states(find("all_gather", "ring"), 5, 1)
    for act, number in (
        (lambda: click(driver, "#next"), 1),
        (lambda: press(driver, "ArrowRight", "ArrowRight"), 3),
        (lambda: click(driver, "#back"), 2),
        (lambda: press(driver, "ArrowLeft"), 1),
        (lambda: click(driver, "#last"), 4),
        (lambda: press(driver, "Home"), 0),
        (lambda: press(driver, "End"), 4),
        (lambda: click(driver, "#first"), 0),
    ):
        act()
        assert shown_state(driver) == states[number]
    assert f"{number} of 4 rounds done" in driver.find_element("id", "status").text


def test_play_goes_to_the_end_and_space_pauses(driver):
    visit(driver, AT_COLLECTIVES.format("all_gather", "ring", 8, 1))
    driver.execute_script("document.activeElement.blur(); byId('speed').value = 400")
    press(driver, "space")
    wait(driver, "step=2")
    press(driver, "space")
    paused = driver.find_element("id", "position").get_attribute("value")
    time.sleep(1)
    assert driver.find_element("id", "position").get_attribute("value") == paused
    assert driver.find_element("id", "play").text == "Play"
    click(driver, "#play")
    wait(driver, "step=7")
    assert driver.find_element("id", "play").get_attribute("aria-pressed") == "false"


def test_keys_keep_their_meaning_in_a_select(driver):
    visit(driver, AT_COLLECTIVES.format("all_reduce", "ring", 4, 1))
    driver.find_element("name", "ranks").send_keys(KEYS["ArrowRight"])
    wait(driver, "ranks=5", "step=0")
    driver.execute_script("document.activeElement.blur()")


@pytest.mark.parametrize(
    ("collective", "name"), [("all_reduce", "ring"), ("all_gather", "direct"), ("gather", "binomial")]
)
def test_moves_in_words_are_the_picture_s(driver, collective, name):
    visit(driver, AT_COLLECTIVES.format(collective, name, 5, 1))
    row = find(collective, name)
    picture = render(lambda rank, size: row.rounds(rank, size, 0, reference.nodes(5, 1)), 5)
    for line in picture.split("\n"):
        words = driver.find_element("css selector", ".moves").text
        assert sorted(words.split("   ")) == sorted(line.partition(":  ")[2].split("   "))
        press(driver, "ArrowRight")


def test_the_line_at_hand_is_marked(driver):
    visit(driver, AT_COLLECTIVES.format("all_reduce", "ring", 4, 1))
    marked = []
    for _ in range(6):
        lines = driver.find_elements("css selector", "#source .now")
        marked.append([line.text.split(None, 1)[1] for line in lines])
        press(driver, "ArrowRight")
    passing = "yield Send(right, chunk(first - step, size)), take(left, chunk(first - step - 1, size))"
    first, second = (f"yield from {part}(rank, size)" for part in ("reduce_scatter", "all_gather"))
    assert marked == [[first, passing]] * 3 + [[second, passing]] * 3
    assert not driver.find_elements("css selector", "#source .now")  # at the end


def test_a_rank_s_moves_are_shown_alone(driver):
    visit(driver, AT_COLLECTIVES.format("all_reduce", "ring", 4, 1))
    names = "return [...document.querySelectorAll('[data-arrow]:not(.aside)')].map(arrow => arrow.dataset.arrow).sort()"
    assert driver.execute_script(names) == ["0>1", "1>2", "2>3", "3>0"]
    driver.find_elements("css selector", ".rank-name")[1].send_keys(KEYS["space"])
    assert driver.execute_script(names) == ["0>1", "1>2"]
    driver.find_elements("css selector", ".rank-name")[1].click()
    assert len(driver.execute_script(names)) == 4
    driver.execute_script("document.activeElement.blur()")


def test_prices_follow_the_network_and_the_vector(driver):
    visit(driver, AT_COLLECTIVES.format("broadcast", "binomial", 16, 4))
    for network, length in (("ndr", "0"), ("100gbe", "3")):
        for name, value in (("network", network), ("length", length)):
            Select(driver.find_element("css selector", f".choices [name={name}]")).select_by_value(value)
        row, nodes = find("broadcast", "binomial"), reference.nodes(16, 4)
        us = predict(row, LENGTHS[int(length)], 16, nodes, 0, FABRICS[network].network) * 1e6
        number, unit = driver.find_element("css selector", ".prices [aria-current=true]").text.split()[-2:]
        assert float(number) * {"s": 1e6, "ms": 1e3, "µs": 1}[unit] == pytest.approx(us, rel=0.01)
    driver.execute_script("document.activeElement.blur()")


@pytest.mark.parametrize(
    "collective",
    [
        pytest.param(each, marks=[pytest.mark.proof] * (each not in ("all_reduce", "exscan", "gather")))
        for each in dict.fromkeys(row.collective for row in REGISTRY)
    ],
)
def test_the_page_decodes_every_state(driver, collective):
    """The states are those of every algorithm, on 1 to 16 ranks, and on several hosts for algorithms that use them."""
    for row in (row for row in REGISTRY if row.collective == collective):
        states = ask(driver, "collectiveStates", collective, row.name)
        assert {tuple(map(int, key.split("x"))) for key in states} == set(reference.runs(row))
        for size, hosts in reference.runs(row):
            assert states[f"{size}x{hosts}"] == reference.prover_states(row, size, hosts), (row.name, size, hosts)


@pytest.mark.parametrize("name", registry.names())
def test_the_page_prices_pipelines_as_the_planner_does(driver, name):
    draws = random.Random(name)
    for size in ("1x1", "2x3", "3x5", "4x8", "8x16"):
        schedule = registry.make_schedule(name, *map(int, size.split("x")))
        times = [draws.choice((0.25, 0.5, 1, 1.75, 4)) for _ in range(schedule.num_stages)]
        message = draws.choice((0, 0.5, 2))
        timeline = price(schedule, Costs(times, times, times, message))
        answer = ask(driver, "pipelineTimes", name, size, times, message)
        spans = [[[s.begin_s, s.end_s] for s in timeline.spans if s.rank == r] for r in range(schedule.num_ranks)]
        assert answer["spans"] == spans
        assert answer["bubble"] == pytest.approx(timeline.bubble)
        for curve, order in zip(answer["alive"], schedule.orders, strict=True):
            assert max(alive for _, alive in curve) == max(num_alive(order))
            assert curve[-1][1] == 0


def test_dragging_a_stage_changes_the_bubble(driver):
    visit(driver, "scene=pipelines&schedule=1f1b&ranks=3&micro_batches=4&step=0")
    schedule = registry.make_schedule("1f1b", 3, 4)
    assert driver.find_element("id", "bubble").text == f"{100 * price(schedule).bubble:.1f}%"
    driver.find_element("css selector", "#stage-times label:nth-of-type(2) input").send_keys(KEYS["ArrowRight"] * 3)
    times = [1, 1.75, 1]
    timeline = price(schedule, Costs(times, times, times))
    assert driver.find_element("id", "bubble").text == f"{100 * timeline.bubble:.1f}%"
    assert driver.find_element("id", "span").text == f"0 of {timeline.span_s:g}"
    click(driver, "#stage-times button")
    assert driver.find_element("id", "bubble").text == f"{100 * price(schedule).bubble:.1f}%"
    driver.execute_script("document.activeElement.blur()")


def test_a_pipeline_shows_what_is_over_and_what_is_kept(driver):
    visit(driver, "scene=pipelines&schedule=zb_h1&ranks=4&micro_batches=6&step=7")
    timeline = price(registry.make_schedule("zb_h1", 4, 6))
    now = float(driver.find_element("id", "status").text.split(" of ")[0])
    states = driver.execute_script(
        "return [...document.querySelectorAll('#grid [data-action]')].map(a => [a.dataset.action, a.dataset.state])"
    )
    spans = timeline.spans
    expected = {s.what: "over" if s.end_s <= now else "running" if s.begin_s <= now else "ahead" for s in spans}
    assert dict(states) == expected
    alive = driver.execute_script(
        "return [...document.querySelectorAll('[data-alive]')].map(a => Number(a.dataset.alive))"
    )
    assert len(alive) == timeline.schedule.num_ranks
    for rank, number in enumerate(alive):
        own = [(parse(span.what).kind, span) for span in spans if span.rank == rank]
        forwards = sum(kind == "F" and span.begin_s <= now for kind, span in own)
        assert number == forwards - sum(kind in "BW" and span.end_s <= now for kind, span in own)


def test_ring_attention_shows_whose_keys_are_where(driver):
    visit(driver, "scene=attention&order=striped&ranks=5&step=0")
    data = attention.ring_data(5, "striped")
    for step in range(5):
        sources = driver.execute_script(
            "return [...document.querySelectorAll('[data-source]')].map(row => Number(row.dataset.source))"
        )
        assert sources == [own[step] for own in data["sources"]]
        now = driver.find_elements("css selector", "#matrix [data-state=now]")
        assert len(now) == sum(row.count(str(step)) for row in data["steps"])
        press(driver, "ArrowRight")
    assert not driver.find_elements("css selector", "#matrix [data-state=now], #matrix [data-state=ahead]")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_shows_what_each_rank_holds(driver, stage):
    visit(driver, f"scene=zero&zero_stage={stage}&ranks=3&micro_batches=1&step=0")
    for what, _, states, _ in zero.trace(stage, 3, 1):
        assert what in driver.find_element("id", "status").text
        cells = driver.execute_script(
            "return [...document.querySelectorAll('#zero [data-held]')].map(c => [...['rank', 'part', 'layer', 'chunk']"
            ".map(name => Number(c.dataset[name])), c.dataset.held])"
        )
        for rank, part, layer, chunk, label in cells:
            state = states[part][layer]
            own = "yes" if state == zero.WHOLE or (state == zero.SHARD and chunk == rank) else "no"
            assert label == ("moving" if state == zero.MOVING else own)
        assert len(cells) == 3 * 3 * zero.LAYERS * 3
        press(driver, "ArrowRight")


@each_window
def test_nothing_overflows_and_nothing_is_logged(path, width, dark):
    with opened(path, width=width, height=900, dark=dark) as driver:
        for scene in SCENES:
            click(driver, f"[data-scene={scene}]")
            wait(driver, f"scene={scene}")
            for name in ("next", "next", "back", "last", "first"):
                click(driver, f"#{name}")
                assert overflow(driver) <= 0
        visit(driver, AT_COLLECTIVES.format("all_to_all", "leaders", 16, 4))
        press(driver, "ArrowRight")
        assert overflow(driver) <= 0


def test_controls_have_names_and_focus_is_seen(driver):
    for scene in SCENES:
        click(driver, f"[data-scene={scene}]")
        wait(driver, f"scene={scene}")
        unnamed = driver.execute_script(
            "return [...document.querySelectorAll('button, select, input, [role=button], [tabindex]')]"
            ".filter(e => !(e.labels && e.labels.length) && !e.getAttribute('aria-label') && !e.textContent.trim())"
            ".map(e => e.outerHTML)"
        )
        assert unnamed == []
    press_tab = driver.find_element("css selector", "[data-scene=zero]")
    press_tab.send_keys("\ue004")  # to the next one
    outline = driver.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_those_who_want_no_motion_get_none(path):
    script = "return document.querySelector('path.arrow').getAnimations().length"
    with opened(path) as driver:
        for preference, number in (("reduce", 0), ("no-preference", 1)):
            features = [{"name": "prefers-reduced-motion", "value": preference}]
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            visit(driver, AT_COLLECTIVES.format("all_reduce", "ring", 4, 1))
            press(driver, "ArrowRight")
            assert driver.execute_script(script) == number
            press(driver, "Home")


def test_an_address_that_names_nothing_shows_what_there_is(path):
    with opened(path) as driver:
        driver.execute_script("location.hash = 'scene=none&collective=all_reduce&algorithm=none&ranks=99&step=x'")
        wait(driver, "algorithm=ring", "ranks=16", "step=0")
        assert json.loads(driver.execute_script("return JSON.stringify(current.choice)"))["collective"] == "all_reduce"


@pytest.mark.proof
def test_the_picture_of_the_page_is_as_it_looks(tmp_path):
    """The home page's and the guide's picture, taken again: of the same size, with few other pixels."""
    reference.picture(tmp_path / "page.png")
    taken, shown = (Image.open(path).convert("L") for path in (tmp_path / "page.png", ROOT / "docs" / "page.png"))
    assert taken.size == shown.size == (1280, 800)
    histogram = ImageChops.difference(taken, shown).histogram()
    assert sum(histogram[64:]) < 0.05 * sum(histogram)  # fonts may differ
