"""Points over two axes: in words, and as a picture."""

import dataclasses
import re
import xml.etree.ElementTree as ET

import pytest

from remat_opt.view import drawing
from remat_opt.view.scatter import Point, Scatter, Series

MIB = 1024**2


def scatter(*series: Series) -> Scatter:
    return Scatter(
        title="Memory & time",
        x=drawing.share_axis("recomputed"),
        y=drawing.bytes_axis("temporaries", 40 * MIB),
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
    assert svg.get("aria-label") == "Memory & time: temporaries against recomputed"
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


def test_no_name_lies_on_the_line():
    named = Series(label="named", points=(Point(x=0.25, y=20 * MIB, label="on it"), *OURS.points))
    svg = parsed(scatter(POLICIES, OURS, named).svg())
    (path,) = local(svg, "path")
    left, y, right = map(float, re.match(r"M([\d.]+),([\d.]+)H([\d.]+)", path.get("d")).groups())
    (name,) = (text for text in local(svg, "text") if text.text == "on it")
    middle = float(name.get("y")) - 4
    at_its_left = name.get("text-anchor") == "end" and float(name.get("x")) < left
    assert at_its_left or float(name.get("x")) > right or abs(middle - y) >= 6


def test_a_name_too_long_for_either_side_goes_above_or_below():
    long = "dots_with_no_batch_dims_saveable, around every block of layers"
    named = Series(label="named", points=(Point(x=0.4, y=10 * MIB, label=long),))
    svg = parsed(scatter(POLICIES, OURS, named).svg())
    (name,) = (text for text in local(svg, "text") if text.text == long)
    (mark,) = (one for one in local(svg, "polygon") if long in "".join(one.itertext()))
    x, y = map(float, mark.get("points").split()[0].split(","))
    assert 0 <= float(name.get("x")) < x < float(name.get("x")) + 6.4 * len(long) <= 640
    assert abs(float(name.get("y")) - y) >= 12
    # With a line from it to the point.
    assert [line for line in local(svg, "line") if line.get("stroke-opacity") == "0.4"]


def test_empty_and_flat_pictures():
    assert parsed(scatter().svg()).get("role") == "img"
    flat = Series(label="flat", points=(Point(x=0.0, y=0.0, label="zero"),))
    assert "nan" not in scatter(flat).svg()


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
    assert drawing.bytes_axis("bytes", most).tick(amount) == said


def test_the_same_data_give_the_same_characters():
    assert scatter(POLICIES, OURS).svg() == scatter(POLICIES, OURS).svg()
    assert " id=" not in scatter(POLICIES, OURS).svg()


def limited(level):
    return dataclasses.replace(scatter(POLICIES, OURS), levels=(("room", level),))


def test_a_level_is_drawn_and_named():
    svg = parsed(limited(60.0 * MIB).svg())
    assert "room 60.0 MiB" in [text.text for text in local(svg, "text")]
    assert [line for line in local(svg, "line") if line.get("stroke-dasharray")]
    assert "level     room" in limited(60.0 * MIB).text()


def test_a_level_far_above_is_named_alone():
    picture = limited(900.0 * MIB)
    assert picture.top == 40 * MIB
    svg = parsed(picture.svg())
    assert "room 900 MiB, far above" in [text.text for text in local(svg, "text")]
    assert not [line for line in local(svg, "line") if line.get("stroke-dasharray")]


def test_a_share_that_rounds_to_all_of_it_has_the_tick_for_all_of_it():
    almost = Series(label="policies", points=(Point(x=0.9999997, y=1 * MIB, label="whole"),))
    assert "100 %" in [text.text for text in local(parsed(scatter(almost).svg()), "text")]
