"""The report page in a real browser: it loads in silence, filters, sorts, and is readable everywhere.

Needs Chromium and its driver, such as Debian's ``chromium`` and ``chromium-driver``; skipped where they are absent,
unless SKUDA_REQUIRE_BROWSER says that they must be there.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from shutil import which

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from skuda.kernels.catalog import built_in_registry
from skuda.tools.cli import main
from skuda.tools.report.measured import load_measured

CHROMIUM = which("chromium") or which("chromium-browser") or which("google-chrome")
DRIVER = which("chromedriver")
REGISTRY = built_in_registry()
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER) and not os.environ.get("SKUDA_REQUIRE_BROWSER"), reason="no Chromium with its driver"
    ),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of the built-in registry and the records of the checkout, as `skuda list --html` writes it."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKUDA_PLUGINS", "0")
        assert main(["list", "--html", str(path)]) == 0
    assert path.stat().st_size < 800 * len(REGISTRY) + 160_000 * len(load_measured()), (
        "as many bytes a kernel and a run"
    )
    return path.as_uri()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    assert CHROMIUM, "SKUDA_REQUIRE_BROWSER is set: install Debian's chromium"
    assert DRIVER, "SKUDA_REQUIRE_BROWSER is set: install Debian's chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def opened(chromium, page):
    chromium.get("about:blank")
    size(chromium, 1280, 900)
    chromium.get(page)
    return chromium


def size(driver, width, height):
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def scheme(driver, name):
    features = [{"name": "prefers-color-scheme", "value": name}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def choose(driver, name, value):
    # Typed, as a reader would: the driver's own way of choosing an option gives the page no `input` event.
    driver.find_element(By.NAME, name).send_keys(value)
    WebDriverWait(driver, 5).until(lambda _: f"{name}={value}" in driver.current_url)


def count(driver):
    return driver.find_element(By.ID, "count").text


def shown(driver, table="kernels"):
    """Return the facets of the rows that are seen."""
    script = """return [...document.querySelectorAll(arguments[0])].filter((row) => row.offsetParent)
        .map((row) => ({...row.dataset}))"""
    return driver.execute_script(script, f"#{table} tbody tr")


def column(driver, table, at):
    script = """return [...document.querySelector(arguments[0]).tBodies[0].rows]
        .map((row) => row.cells[arguments[1]].textContent)"""
    return driver.execute_script(script, table, at)


def told(number):
    return f"{number:,} of {len(REGISTRY):,} kernels"


def test_it_loads_without_an_error_and_without_the_network(opened):
    opened.get_log("performance")
    opened.refresh()
    assert opened.title == "skuda report"
    assert count(opened) == told(len(REGISTRY))
    assert opened.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if url.startswith("file:")], "the log is alive"
    assert [url for url in asked if not url.startswith(("file:", "data:", "about:"))] == []


def test_filters_narrow_list_and_matrix_and_the_count_says_so(opened):
    choose(opened, "backend", "numpy")
    mine = [sku for sku in REGISTRY if sku.backend == "numpy"]
    assert count(opened) == told(len(mine))
    assert {row["backend"] for row in shown(opened)} == {"numpy"}
    assert len(shown(opened)) == len(mine)
    choose(opened, "op", "fill")
    mine = [sku for sku in mine if sku.op == "fill"]
    assert count(opened) == told(len(mine))
    assert {row["op"] for row in shown(opened, "matrix")} == {"fill"}
    choose(opened, "arch", "sm_80")
    assert count(opened) == told(0)
    opened.find_element(By.CSS_SELECTOR, "#filters button[type=reset]").click()
    assert count(opened) == told(len(REGISTRY))
    assert len(shown(opened, "matrix")) == len({(sku.op, sku.element) for sku in REGISTRY})


def test_text_is_looked_for_word_by_word(opened):
    field = opened.find_element(By.NAME, "q")
    field.send_keys("SMOOTHQUANT warpgroup")
    mine = [sku for sku in REGISTRY if sku.op == "smoothquant_linear" and sku.variant == "warpgroup"]
    assert mine
    assert count(opened) == told(len(mine))
    field.send_keys(Keys.ENTER)
    assert count(opened) == told(len(mine)), "Enter does not leave the page"


def test_the_address_keeps_the_filters(opened):
    choose(opened, "op", "dynamic_range")
    choose(opened, "element", "bf16")
    address = opened.current_url
    assert address.endswith("#op=dynamic_range&element=bf16")
    before = count(opened)
    opened.get("about:blank")
    opened.get(address)
    assert count(opened) == before
    assert Select(opened.find_element(By.NAME, "op")).first_selected_option.text == "dynamic_range"
    opened.find_element(By.LINK_TEXT, "Measured").click()
    assert count(opened) == before, "a link to a section leaves the filters alone"
    opened.refresh()
    assert count(opened) == told(len(REGISTRY)), "the address of a section has no filters"


def test_a_cell_of_the_matrix_shows_its_kernels(opened):
    link = opened.find_element(By.CSS_SELECTOR, "#matrix tr[data-op=fill] .cell a")
    number = int(link.text.split()[1])
    opened.execute_script("arguments[0].click()", link)
    WebDriverWait(opened, 5).until(lambda _: count(opened) != told(len(REGISTRY)))
    assert count(opened) == told(number)
    assert {row["op"] for row in shown(opened)} == {"fill"}


def test_text_sorts_both_ways(opened):
    heading, other = opened.find_elements(By.CSS_SELECTOR, "#matrix thead th")[:2]
    choose(opened, "backend", "numpy")
    seen, before = len(shown(opened, "matrix")), column(opened, "#matrix", 0)
    heading.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    assert heading.get_attribute("aria-sort") == "ascending"
    assert column(opened, "#matrix", 0) == sorted(before)
    heading.find_element(By.TAG_NAME, "button").send_keys(Keys.SPACE)
    assert heading.get_attribute("aria-sort") == "descending"
    assert column(opened, "#matrix", 0) == sorted(before, reverse=True)
    other.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    assert heading.get_attribute("aria-sort") is None
    assert column(opened, "#matrix", 1) == sorted(column(opened, "#matrix", 1))
    assert len(shown(opened, "matrix")) == seen, "what is filtered out stays out"


def test_numbers_sort_by_size_and_what_is_empty_stands_last(opened):
    """The first bench with a rival that refused somewhere: its column has numbers and gaps."""
    script = """
        for (const table of document.querySelectorAll("section:last-of-type table.sortable")) {
          const heads = [...table.tHead.rows[0].cells];
          const at = heads.findIndex((h, i) => h.textContent.startsWith("x ") &&
            [...table.tBodies[0].rows].some((r) => r.cells[i].textContent === ""));
          if (at < 0) continue;
          const read = () => [...table.tBodies[0].rows].map((r) => r.cells[at].textContent);
          const found = [];
          for (let turn = 0; turn < 2; turn++) { heads[at].querySelector("button").click(); found.push(read()); }
          return found;
        }"""
    for way, values in zip((1, -1), opened.execute_script(script), strict=True):
        filled = [float(value) for value in values if value]
        assert filled == sorted(filled, reverse=way < 0)
        assert values[len(filled) :] == [""] * (len(values) - len(filled))
        assert 0 < len(filled) < len(values)


CONTRAST = """
    const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
    const light = ([r, g, b]) => {
      const [x, y, z] = [r, g, b].map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
      return 0.2126 * x + 0.7152 * y + 0.0722 * z;
    };
    const behind = (node) => {
      for (; node; node = node.parentElement) {
        const found = parse(getComputedStyle(node).backgroundColor);
        if (found.length === 3 || found[3] > 0) return found;
      }
      throw Error("no background");
    };
    const worst = {};
    for (const node of document.querySelectorAll("body *")) {
      const said = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
      if (!said || !node.getClientRects().length || node.tagName === "SCRIPT") continue;
      const style = getComputedStyle(node);
      const front = parse(node instanceof SVGElement ? style.fill : style.color);
      const [a, b] = [light(front), light(behind(node))];
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      const key = `${front} on ${behind(node)}`;
      worst[key] ??= [ratio, node.outerHTML.slice(0, 80)];
    }
    return worst;
"""


@pytest.mark.parametrize("name", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(opened, name):
    scheme(opened, name)
    found = opened.execute_script(CONTRAST)
    assert len(found) > 6
    assert [(pair, told) for pair, told in found.items() if told[0] < 4.5] == []
    paper = opened.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") is (name == "light")


def test_marks_of_plots_show_in_light_and_dark(opened):
    """Graphics need less than text: three to one against the page."""
    script = CONTRAST.replace("body *", "svg use").replace("if (!said ||", "if (").replace("style.fill", "style.stroke")
    for name in ("light", "dark"):
        scheme(opened, name)
        found = opened.execute_script(script)
        assert len(found) > 3
        assert [(pair, told) for pair, told in found.items() if told[0] < 3] == [], name


def test_a_phone_scrolls_tables_and_not_the_page(opened):
    size(opened, 360, 740)
    assert opened.execute_script("return [innerWidth, document.documentElement.scrollWidth]") == [360, 360]
    boxes = opened.execute_script("""return [...document.querySelectorAll(".scroll")]
        .map((box) => [box.scrollWidth, box.clientWidth, box.tabIndex])""")
    wide = [keyboard for inside, outside, keyboard in boxes if inside > outside]
    assert wide, "a table is wider than a phone"
    assert set(wide) == {0}, "and is reached with the keyboard"


@contextmanager
def without_scripts(driver):
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    yield
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_without_javascript_everything_is_there_but_the_form(opened):
    with without_scripts(opened):
        opened.refresh()
        root = opened.execute_cdp_cmd("DOM.getDocument", {})["root"]["nodeId"]

        def found(selector):
            return opened.execute_cdp_cmd("DOM.querySelectorAll", {"nodeId": root, "selector": selector})["nodeIds"]

        assert len(found("#kernels tbody tr:not([hidden])")) == len(REGISTRY)
        assert len(found("#filters[hidden]")) == 1
        assert found("thead button") == []
