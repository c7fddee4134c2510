import re
import xml.etree.ElementTree as ET

import pytest

from remat_opt.view import report
from remat_opt.view.report import Point, Profile, Scatter, Series, Table

MIB = 1024**2


def table(**changes) -> Table:
    fields = {
        "title": "Two values",
        "headings": ("value", "bytes"),
        "rows": (("a", "1 B"), ("<b> & 'c'", "12 KiB")),
        "align": "lr",
        "footer": "and no more",
    }
    return Table(**{**fields, **changes})


def scatter(*series: Series) -> Scatter:
    return Scatter(
        title="Memory & time",
        x=report.share_axis("recomputed"),
        y=report.bytes_axis("temporaries", 40 * MIB),
        series=series,
    )


POLICIES = Series(
    label="policies",
    points=(Point(x=1.0, y=10 * MIB, label="nothing <saved>"), Point(x=0, y=40 * MIB, label="all")),
)
OURS = Series(
    label="ours",
    points=(Point(x=0.5, y=8 * MIB, label="half"), Point(x=0.25, y=20 * MIB, label="quarter")),
    staircase=True,
)


def parsed(markup: str) -> ET.Element:
    return ET.fromstring(markup)


def words(element: ET.Element) -> list[str]:
    return [text.strip() for text in element.itertext() if text.strip()]


def local(element: ET.Element, name: str) -> list[ET.Element]:
    return [found for found in element.iter() if found.tag.rpartition("}")[2] == name]


def test_table_as_text():
    assert table().text() == (
        "Two values\n"
        "value       bytes\n"
        "---------  ------\n"
        "a             1 B\n"
        "<b> & 'c'  12 KiB\n"
        "and no more"
    )


def test_table_without_title_footer_and_rows():
    assert table(title="", footer="", rows=()).text() == "value  bytes\n-----  -----"


def test_table_as_html_holds_the_same_words_escaped():
    markup = table().html()
    assert "&lt;b&gt; &amp; &#x27;c&#x27;" in markup
    assert words(parsed(f"<div>{markup}</div>")) == [
        *("Two values", "value", "bytes", "a", "1 B", "<b> & 'c'", "12 KiB", "and no more")
    ]


def test_table_refuses_ragged_rows():
    message = "The table 'Two values' has 2 headings, 2 alignments and rows of [1] cells."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        table(rows=(("a",),))


def test_facts():
    facts = [("peak", "1 MiB"), ("regions", "<3>")]
    assert report.facts_text(facts) == "peak     1 MiB\nregions  <3>"
    assert words(parsed(report.facts_html(facts))) == ["peak", "1 MiB", "regions", "<3>"]


def test_scatter_as_text():
    assert scatter(POLICIES, OURS).text() == (
        "Memory & time\n"
        "                           recomputed  temporaries\n"
        "--------  ---------------  ----------  -----------\n"
        "policies  nothing <saved>       100 %     10.0 MiB\n"
        "policies  all                     0 %     40.0 MiB\n"
        "ours      half                 50.0 %     8.00 MiB\n"
        "ours      quarter              25.0 %     20.0 MiB"
    )


def test_scatter_as_svg_names_every_point_and_describes_itself():
    picture = scatter(POLICIES, OURS)
    svg = parsed(picture.svg())
    assert svg.get("role") == "img"
    assert svg.get("aria-label") == "Memory & time"
    assert [d.text for d in local(svg, "desc")] == [picture.text()]
    titles = [title.text for title in local(svg, "title")]
    assert "nothing <saved>: 10.0 MiB, 100 %" in titles
    assert "half: 8.00 MiB, 50.0 %" in titles
    shown = [text.text for text in local(svg, "text")]
    assert {"policies", "ours", "nothing <saved>", "all"} <= set(shown)
    assert "half" not in shown
    assert {"0 %", "20 %", "100 %", "0 MiB", "10 MiB", "40 MiB"} <= set(shown)


def test_a_staircase_steps_down_at_its_points():
    (path,) = local(parsed(scatter(OURS).svg()), "path")
    # From the quarter, level to where a half may be recomputed, then down.
    assert re.fullmatch(r"M[\d.]+,[\d.]+H[\d.]+V[\d.]+", path.get("d"))


def test_all_marks_lie_inside_the_picture():
    for mark in local(parsed(scatter(POLICIES, OURS).svg()), "circle"):
        assert 0 <= float(mark.get("cx")) <= 640
        assert 0 <= float(mark.get("cy")) <= 360


def test_names_that_would_overlap_are_moved_apart():
    close = Series(
        label="policies",
        points=tuple(Point(x=0.0, y=10 * MIB, label=f"policy {n}") for n in range(4)),
    )
    svg = parsed(scatter(close).svg())
    heights = [float(t.get("y")) for t in local(svg, "text") if t.text.startswith("policy ")]
    assert len(heights) == 4
    assert min(abs(a - b) for n, a in enumerate(heights) for b in heights[:n]) >= 12


def test_empty_and_flat_pictures():
    assert parsed(scatter().svg()).get("role") == "img"
    flat = Series(label="flat", points=(Point(x=0.0, y=0.0, label="zero"),))
    assert "nan" not in scatter(flat).svg()


def profile(*amounts: float, **changes) -> Profile:
    fields = {
        "title": "Live",
        "amounts": amounts,
        "x": report.steps_axis("step"),
        "y": report.bytes_axis("bytes", max(amounts, default=0)),
        "levels": (("budget", 4 * MIB),),
    }
    return Profile(**{**fields, **changes})


def test_profile_as_text():
    assert profile(MIB, 2 * MIB, 4 * MIB, 0).text() == (
        "Live: highest 4.00 MiB at step 3 of 4; budget 4.00 MiB\n▃▅█▁"
    )


def test_profile_without_steps():
    assert profile().text() == "Live: nothing to show."
    assert parsed(profile().svg()).get("aria-label") == "Live: nothing to show."


def test_profile_as_svg_says_its_peak():
    svg = parsed(profile(MIB, 2 * MIB, 4 * MIB).svg())
    assert svg.get("aria-label") == "Live: highest 4.00 MiB at step 3 of 3; budget 4.00 MiB"
    assert "highest: 4.00 MiB" in [title.text for title in local(svg, "title")]
    assert "budget 4.00 MiB" in [text.text for text in local(svg, "text")]


def test_thinning_a_long_profile_keeps_its_peak():
    amounts = [float(MIB)] * 5000
    amounts[3333] = 8.0 * MIB
    picture = profile(*amounts)
    assert "█" in picture.text().split("\n")[1]
    assert len(picture.text().split("\n")[1]) == 72
    assert len(picture.svg()) < 30_000


@pytest.mark.parametrize(
    ("most", "amount", "said"),
    [
        (500, 200, "200 B"),
        (3 * 1024, 1024, "1 KiB"),
        (5 * 1024**3, 2.5 * 1024**3, "2.5 GiB"),
        (0, 0, "0 B"),
        (2048 * 1024**5, 1024**5, "1 PiB"),
    ],
)
def test_ticks_of_bytes(most, amount, said):
    assert report.bytes_axis("bytes", most).tick(amount) == said


def test_the_same_data_give_the_same_characters():
    assert scatter(POLICIES, OURS).svg() == scatter(POLICIES, OURS).svg()


def test_markup_has_no_identifiers_that_could_clash_on_a_page():
    assert " id=" not in table().html() + scatter(POLICIES, OURS).svg()


def test_a_page_is_a_document_that_follows_light_and_dark():
    page = report.page("a < b", report.section("t", "<p>x</p>", ""))
    assert page.startswith("<!DOCTYPE html>")
    assert "<title>a &lt; b</title>" in page
    assert "color-scheme:light dark" in page
    assert page.count("<p>x</p>") == 1


def test_a_share_that_rounds_to_all_of_it_has_the_tick_for_all_of_it():
    almost = Series(label="policies", points=(Point(x=0.9999997, y=1 * MIB, label="whole"),))
    assert "100 %" in [text.text for text in local(parsed(scatter(almost).svg()), "text")]
