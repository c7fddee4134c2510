"""The page of a plan as people use it: in a real browser, without a screen.

Needs Chromium on this machine, as from Debian's package ``chromium``, and Playwright to drive it;
nothing is downloaded.
"""

import shutil

import pytest

from remat_opt.view import drawing, page, plan_page, report
from remat_opt.view.scatter import Point, Scatter, Series
from tests.view.plans import MIB, decision, plan, timeline

pytestmark = pytest.mark.slow

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FATES = ("kept", "recomputed", "not needed")


def many(count):
    """A plan of this many values in ten regions."""
    decisions = [
        decision(
            FATES[n % 3],
            root=n,
            what=f"sum in Block_{n}",
            module=f"Net/Stage_{n % 50}/Block_{n}",
            source=f"net.py:{n} (call)",
            bytes=(n * 7919 % 1000) * MIB,
            seconds=1e-6 * (n % 100),
            region=n * 10 // count,
        )
        for n in range(count)
    ]
    moments = 60
    told = timeline(
        [min(n, moments - n) for n in range(moments)], gradients=[n % 5 for n in range(moments)]
    )
    stages = [{"roots": [n], "kept": [n], "checkpointed": n < 9, "inside": []} for n in range(10)]
    return plan(
        decisions=decisions,
        stages=stages,
        as_compiled=[n * MIB for n in range(30)],
        predicted={"timeline": told, "plain_timeline": told},
        budget_bytes=40 * MIB,
    )


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser is found: none of {', '.join(BROWSERS)}")
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright drives the browser")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    for count in (60, 10_000):
        text = page.document("plan", plan_page.html(many(count), plan_page.MOST_ALONE))
        (folder / f"{count}.html").write_text(text, encoding="utf-8")
    picture = Scatter(
        title="Best plans",
        x=drawing.share_axis("recomputed"),
        y=drawing.bytes_axis("temporaries", 4 * MIB),
        series=(Series(label="plain", points=(Point(x=0.5, y=4 * MIB, label="plain"),)),),
    )
    text = page.document("frontier", report.section("Best plans", picture.svg()))
    (folder / "frontier.html").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def opened(browser, files):
    """Opens a page, and fails the test if there was an error or a network request."""
    contexts, complaints, asked = [], [], []

    def open_page(count=60, **options):
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        contexts.append(context)
        shown = context.new_page()
        shown.on("console", lambda message: complaints.append(message.text))
        shown.on("pageerror", lambda error: complaints.append(str(error)))
        shown.on("request", lambda request: asked.append(request.url))
        shown.goto((files / f"{count}.html").as_uri())
        return shown

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert not [url for url in asked if not url.startswith(("file:", "data:"))]


def titles(shown):
    return shown.locator("[data-row] td:first-child b").all_inner_texts()


def test_the_table_sorts(opened):
    shown = opened()
    head = shown.locator(".ro-scroll th")
    assert head.nth(2).get_attribute("aria-sort") == "descending"
    sizes = shown.locator("[data-row] td:nth-child(3)").all_inner_texts()
    assert sizes[0] == f"{max(n * 7919 % 1000 for n in range(60))} MiB"
    shown.get_by_role("button", name="value").click()
    assert head.nth(0).get_attribute("aria-sort") == "ascending"
    assert head.nth(2).get_attribute("aria-sort") is None
    # Numbers in names count as numbers.
    assert titles(shown)[:3] == [f"sum in Block_{n}, 8x8 float32" for n in range(3)]
    shown.get_by_role("button", name="value").click()
    assert titles(shown)[0] == "sum in Block_59, 8x8 float32"


def test_the_table_filters(opened):
    shown = opened()
    said = shown.locator(".ro-controls [role=status]")
    assert said.inner_text().startswith("60 of 60 values, ")
    shown.get_by_label("Filter values").fill("net.py:4 stage_4")
    assert said.inner_text().startswith("11 of 60 values")
    shown.get_by_label("Fate").select_option("recomputed")
    assert said.inner_text().startswith("5 of 60 values")
    chips = shown.locator("[data-row] .ro-chip").all_inner_texts()
    assert set(chips) == {"recomputed"}
    shown.get_by_label("Filter values").fill("nothing of the kind")
    assert shown.get_by_text("No value matches.").is_visible()


def test_a_value_says_why(opened):
    shown = opened()
    shown.get_by_label("Filter values").fill("Block_31")
    shown.locator("[data-row]").first.click()
    detail = shown.locator(".ro-detail").inner_text()
    assert "sum in Block_31, 8x8 float32 (dot_general)" in detail
    assert "Keeping it would take 489 MiB more and save at most 31.0 us of recomputation" in detail
    assert "net.py:31 (call)" in detail


def test_pointing_at_a_moment_tells_what_is_alive(opened):
    shown = opened()
    plot, panel = shown.locator(".ro-plot").first, shown.locator(".ro-alive").first
    assert "At the peak" in panel.inner_text()
    box = plot.bounding_box()
    shown.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + box["height"] / 2)
    assert "At the peak" not in panel.inner_text()
    assert "as compiled" in panel.inner_text()
    assert "sum in Block_0" in panel.inner_text()
    cursor = shown.locator(".ro-cursor").first
    assert cursor.evaluate("one => getComputedStyle(one).display") != "none"
    shown.mouse.move(5, 5)
    assert "At the peak" in panel.inner_text()


def test_the_keyboard_does_all_that_the_mouse_does(opened):
    shown = opened()
    plot = shown.locator(".ro-plot").first
    plot.focus()
    plot.press("Home")
    assert plot.get_attribute("aria-valuenow") == "1"
    plot.press("ArrowRight")
    assert plot.get_attribute("aria-valuenow") == "2"
    assert "step 2 of 60, backward: sum in Block_0" in plot.get_attribute("aria-valuetext")
    table = shown.locator(".ro-scroll")
    table.focus()
    table.press("End")
    assert shown.locator("[aria-selected=true]").get_attribute("data-row") == "59"
    assert shown.locator("[aria-selected=true]").is_visible()
    table.press("ArrowUp")
    assert shown.locator("[aria-selected=true]").get_attribute("data-row") == "58"
    shown.get_by_role("button", name="bytes").press("Enter")
    assert shown.locator(".ro-scroll th").nth(2).get_attribute("aria-sort") == "ascending"


def test_all_that_moves_is_reached_by_tab(opened):
    shown = opened()
    reached = []
    for _ in range(21):
        shown.keyboard.press("Tab")
        reached.append(shown.evaluate(ACTIVE))
    assert reached.count("ro-plot") == 2
    assert {"INPUT", "SELECT", "ro-scroll", "BUTTON", "SUMMARY"} <= set(reached)


def test_regions_fold(opened):
    shown = opened()
    region = shown.locator(".ro-tree > details").first
    leaves = region.locator(".ro-leaf")
    assert leaves.count() == 0
    region.locator("summary").first.press("Enter")
    module = region.locator("details").first
    assert module.is_visible()
    module.locator("summary").first.click()
    module.locator(".ro-leaf").first.wait_for()
    assert "sum in Block_0" in module.inner_text()
    region.locator("summary").first.press("Enter")
    assert not module.is_visible()


ACTIVE = "document.activeElement.className || document.activeElement.tagName"
GROUND = "getComputedStyle(document.querySelector('.remat-opt')).backgroundColor"
CONTRAST = """(selector) => {
  const light = (color) => {
    const [r, g, b] = color.match(/[0-9.]+/g).slice(0, 3).map((part) => {
      const c = part / 255;
      return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const one = document.querySelector(selector);
  let behind = one;
  const ground = () => getComputedStyle(behind).backgroundColor;
  while (ground() === "rgba(0, 0, 0, 0)") behind = behind.parentNode;
  const [low, high] = [light(getComputedStyle(one).color),
    light(ground())].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
def test_it_is_legible_and_fits(opened, scheme, width):
    shown = opened(color_scheme=scheme, viewport={"width": width, "height": 800})
    assert (
        shown.evaluate(GROUND) == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 25, 29)"}[scheme]
    )
    for selector in ("h2", ".ro-sub", ".ro-figures .ro-sub", ".ro-detail", ".ro-chip", ".ro-num"):
        assert shown.evaluate(CONTRAST, selector) >= 4.5, selector
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.locator(".ro-wide:visible").count() == (2 if width == 1200 else 0)
    assert shown.locator(".ro-narrow:visible").count() == (0 if width == 1200 else 2)
    assert titles(shown)[0].startswith("sum in Block_")


def test_a_picture_on_a_narrow_page_scrolls_before_its_words_are_too_small(opened):
    shown = opened("frontier", viewport={"width": 400, "height": 800})
    assert shown.evaluate("document.documentElement.scrollWidth") <= 400
    words = shown.locator("svg text", has_text="plain").first
    assert words.bounding_box()["height"] >= 10
    wide = opened("frontier")
    assert wide.locator("svg").bounding_box()["width"] == 640


@pytest.mark.parametrize(
    ("scheme", "change", "ground"),
    [
        ("light", "dataset.jpThemeLight = 'false'", "rgb(22, 25, 29)"),
        ("dark", "dataset.jpThemeLight = 'true'", "rgb(255, 255, 255)"),
        ("light", "className = 'vscode-dark'", "rgb(22, 25, 29)"),
        ("dark", "className = 'vscode-light'", "rgb(255, 255, 255)"),
    ],
)
def test_it_goes_with_the_notebook_it_is_in(opened, scheme, change, ground):
    shown = opened(color_scheme=scheme)
    shown.evaluate(f"document.body.{change}")
    assert shown.evaluate(GROUND) == ground


def test_jupyterlab_rules_for_outputs_do_not_reach_it(opened):
    """Its style sheet sets tables and lists in outputs, by selectors of these forms."""
    shown = opened()
    shown.evaluate("document.body.className = 'jp-RenderedHTMLCommon'")
    shown.add_style_tag(
        content="""
        .jp-RenderedHTMLCommon:not(.jp-RenderedMarkdown) td,
        .jp-RenderedHTMLCommon:not(.jp-RenderedMarkdown) th { text-align: right; }
        .jp-RenderedHTMLCommon ul:not(.list-inline) { padding-left: 2em; }
        """
    )
    style = "(one, name) => getComputedStyle(one)[name]"
    assert shown.locator("[data-row] td").first.evaluate(style, "textAlign") == "left"
    assert shown.locator("[data-row] td.ro-num").first.evaluate(style, "textAlign") == "right"
    assert shown.locator("ul.ro-margins").first.evaluate(style, "paddingLeft") == "0px"


def test_it_works_in_a_frame_that_may_do_nothing_but_run_scripts(opened, files):
    """As VS Code shows outputs: a different origin, and no storage."""
    shown = opened()
    shown.evaluate(
        """text => {
            const frame = document.createElement("iframe");
            frame.sandbox = "allow-scripts";
            frame.srcdoc = text;
            document.body.replaceChildren(frame);
        }""",
        (files / "60.html").read_text(encoding="utf-8"),
    )
    inside = shown.frame_locator("iframe")
    inside.get_by_label("Filter values").fill("Block_7")
    inside.get_by_text("1 of 60 values").first.wait_for()


def test_without_scripts_it_is_all_there(opened):
    shown = opened(java_script_enabled=False)
    assert shown.get_by_text("At the peak").first.is_visible()
    assert shown.locator(".ro-values tbody tr").count() == 20
    assert shown.locator(".ro-tree > details").count() == 10
    assert shown.get_by_text("Dropping it would free").first.is_visible()


def test_ten_thousand_values_are_quick(opened):
    shown = opened(10_000)
    assert shown.locator("[data-row]").first.is_visible()
    assert shown.locator(".ro-scroll tr").count() < 60
    assert shown.evaluate("document.querySelectorAll('*').length") < 6_000
    shown.get_by_label("Filter values").fill("Block_77")
    assert "111 of 10,000 values" in shown.locator(".ro-controls [role=status]").inner_text()
    shown.get_by_role("button", name="value").click()
    assert titles(shown)[0] == "sum in Block_77, 8x8 float32"
    shown.get_by_label("Filter values").fill("")
    scroll = shown.locator(".ro-scroll")
    scroll.evaluate("one => { one.scrollTop = one.scrollHeight }")
    shown.wait_for_selector('[data-row="9999"]')
    assert shown.locator(".ro-scroll tr").count() < 60
