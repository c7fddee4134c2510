import re
import xml.etree.ElementTree as ET

import pytest

from remat_opt.view.memory_chart import COLORS, Band, Level, Line, MemoryChart

MIB = 2**20


def chart(**changes) -> MemoryChart:
    fields = {
        "title": "Live",
        "bands": (
            Band(label="kept", kind="kept", amounts=(MIB, 2 * MIB, 2 * MIB)),
            Band(label="gradients", kind="gradients", amounts=(0, 0, MIB)),
        ),
        "turn": 2,
    }
    return MemoryChart(**{**fields, **changes})


def local(markup: str, name: str) -> list[ET.Element]:
    return [one for one in ET.fromstring(markup).iter() if one.tag.rpartition("}")[2] == name]


def written(markup: str) -> list[str]:
    return [one.text for one in local(markup, "text")]


def test_the_picture_says_its_peak_and_its_passes():
    words = written(chart().svg())
    assert "peak 3.00 MiB" in words
    assert {"forward", "backward"} <= set(words)


def test_bands_are_stacked():
    kept, gradients = [
        path.get("d")
        for path in local(chart().svg(), "path")
        if "--ro-" in (path.get("style") or "")
    ]
    # The upper edge of the first is the lower edge of the second.
    assert re.findall(r"V([\d.]+)", kept)[1] in re.findall(r"[V,]([\d.]+)", gradients)


def test_kinds_have_colours_that_the_page_may_change():
    styles = [path.get("style") for path in local(chart().svg(), "path") if path.get("style")]
    assert styles == [f"fill:var(--ro-{kind},{COLORS[kind]})" for kind in ("kept", "gradients")]


def test_lines_and_levels_are_told():
    full = chart(
        lines=(Line(label="as compiled", amounts=(MIB, 4 * MIB)),),
        levels=(Level(label="budget", amount=5 * MIB),),
    )
    assert full.highest == 5 * MIB
    assert full.caption() == (
        "Live: highest 3.00 MiB at moment 3 of 3 (backward); as compiled 4.00 MiB; budget 5.00 MiB"
    )
    assert "budget 5.00 MiB" in written(full.svg())
    titles = [title.text for title in local(full.svg(), "title")]
    assert "as compiled: at most 4.00 MiB" in titles


def test_the_name_of_a_level_stands_at_its_own_line():
    """Narrow, so that the peak's name is in the way; the higher of two is named above it."""
    levels = (Level(label="budget for all of it", amount=33 * MIB // 10),)
    levels = (*levels, Level(label="temporaries", amount=31 * MIB // 10))
    for ordered in (levels, levels[::-1]):
        markup = chart(levels=ordered).svg(360, 200)
        heights = {one.text: float(one.get("y")) for one in local(markup, "text")}
        budget, temporaries = (
            heights["budget for all of it 3.30 MiB"],
            heights["temporaries 3.10 MiB"],
        )
        drawn = [
            float(one.get("y1"))
            for one in local(markup, "line")
            if one.get("stroke-dasharray") == "6 4"
        ]
        assert budget < min(drawn) < max(drawn) < temporaries


def test_two_charts_share_a_scale():
    low, high = (chart(top=top).text(12).split("\n")[1] for top in (3 * MIB, 12 * MIB))
    assert max(low) == "█"
    assert max(high) == "▂"


def test_nothing_to_show():
    nothing = chart(bands=())
    assert nothing.text() == "Live: nothing to show."
    assert ET.fromstring(nothing.svg()).get("aria-label") == "Live: nothing to show."


def test_bands_of_unlike_length_are_refused():
    message = "The bands of 'Live' have [1, 2] moments: all must have as many."
    with pytest.raises(ValueError, match=re.escape(message)):
        chart(bands=tuple(Band(label="", kind="kept", amounts=(0,) * n) for n in (1, 2)))


def test_a_long_line_of_moments_keeps_its_peak():
    amounts = [MIB] * 5000
    amounts[3333] = 8 * MIB
    long = chart(bands=(Band(label="kept", kind="kept", amounts=tuple(amounts)),), turn=None)
    assert "█" in long.text(72).split("\n")[1]
    assert len(long.svg()) < 10_000
