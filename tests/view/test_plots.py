"""Pictures on matplotlib's axes; what is drawn, not how it looks."""

import dataclasses
import itertools
import sys

import pytest

from remat_opt.errors import MissingPackageError
from remat_opt.view import data_frame, drawing, plan_words, plots
from remat_opt.view.scatter import Point, Scatter, Series
from tests.view.plans import MIB, decision, plan


@pytest.fixture
def ax():
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib draws them")
    matplotlib.use("agg")
    figure = pytest.importorskip("matplotlib.figure").Figure()
    return figure.subplots()


PICTURE = Scatter(
    title="Memory",
    x=drawing.share_axis("recomputed"),
    y=drawing.bytes_axis("temporaries", 4 * MIB),
    series=(
        Series(label="defaults", points=(Point(x=0.5, y=4 * MIB, label="dots"),)),
        Series(
            label="ours",
            points=(Point(x=0.25, y=2 * MIB, label="a"), Point(x=0, y=3 * MIB, label="b")),
            staircase=True,
        ),
    ),
    levels=(("room", 5.0 * MIB),),
)


def test_memory_against_overhead(ax):
    assert plots.scatter(PICTURE, ax) is ax
    defaults, ours, level = ax.lines
    assert (list(defaults.get_xdata()), list(defaults.get_ydata())) == ([50], [4])
    assert defaults.get_linestyle() == "None"
    assert (list(ours.get_xdata()), list(ours.get_ydata())) == ([0, 25], [3, 2])
    assert ours.get_linestyle() == "-"
    assert list(level.get_ydata()) == [5, 5]
    assert [text.get_text() for text in ax.texts] == ["room 5.00 MiB", "dots"]
    assert ax.get_ylabel() == "temporaries, MiB"


def test_no_name_lies_on_another(ax):
    names = ["dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable", "plain"]
    crowd = [Point(x=1 + n / 100, y=4 * MIB + 1000 * n, label=name) for n, name in enumerate(names)]
    crowd.append(Point(x=0, y=5 * MIB, label="on the line"))
    plots.scatter(
        dataclasses.replace(PICTURE, series=(Series(label="all", points=tuple(crowd)),)), ax
    )
    texts = [text for text in ax.texts if text.get_text()]
    assert {text.get_text() for text in texts} == {*names, "on the line", "room 5.00 MiB"}
    boxes = [text.get_window_extent() for text in texts]
    assert not [1 for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]
    room = ax.get_window_extent()
    assert all(room.x0 <= box.x0 and box.x1 <= room.x1 for box in boxes)
    limit = ax.transData.transform((0, 5))[1]
    assert not [box for box in boxes if box.y0 < limit < box.y1]


def test_a_long_name_goes_above_or_below(ax):
    long = "dots_with_no_batch_dims_saveable, around every single block"
    points = (Point(x=0.5, y=3 * MIB, label=long), Point(x=1, y=4 * MIB, label="nothing"))
    series = (Series(label="all", points=points), PICTURE.series[1])
    plots.scatter(dataclasses.replace(PICTURE, series=series), ax)
    (name,) = (text for text in ax.texts if text.get_text() == long)
    room, box = ax.get_window_extent(), name.get_window_extent()
    assert room.x0 - 1 <= box.x0
    assert box.x1 <= room.x1 + 1
    assert not box.y0 < ax.transData.transform((50, 3))[1] < box.y1


def test_a_level_far_above_is_named_alone(ax):
    plots.scatter(dataclasses.replace(PICTURE, levels=(("room", 900.0 * MIB),)), ax)
    assert "room 900 MiB, far above" in [text.get_text() for text in ax.texts]
    assert len(ax.lines) == 2


def test_no_name_lies_on_the_line(ax):
    ours = PICTURE.series[1]
    on_it = tuple(Point(x=one.x, y=one.y, label=f"as {one.label}") for one in ours.points)
    between = Point(x=0.1, y=3 * MIB, label="between")
    named = Series(label="named", points=(*on_it, between))
    plots.scatter(dataclasses.replace(PICTURE, series=(named, ours)), ax)
    boxes = {text.get_text(): text.get_window_extent() for text in ax.texts}
    assert {"as a", "as b", "between"} <= set(boxes)
    (level, y), (right, low) = ax.transData.transform([(0, 3), (25, 2)])
    for box in boxes.values():
        assert not (box.y0 < y < box.y1 and box.x0 < right and level < box.x1)
        assert not (box.x0 < right < box.x1 and box.y0 < y and low < box.y1)


def test_memory_over_time(ax):
    given = plan(decisions=[decision()], budget_bytes=5 * MIB, as_compiled=[MIB, 2 * MIB])
    assert plots.memory(plan_words.charts(given), "Plan", ax) is ax
    assert [area.get_label() for area in ax.collections] == ["kept", "gradients"]
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["unchanged function", "as compiled", "gradients", "kept"]
    assert ax.get_title() == "Plan"


def test_what_is_missing_is_named(monkeypatch):
    for name in ("matplotlib", "matplotlib.pyplot", "pandas"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackageError) as caught:
        plots.scatter(PICTURE)
    assert str(caught.value) == (
        "A plot needs the package matplotlib, which is not installed. Install it with: "
        "pip install 'remat_opt[plots]'"
    )
    with pytest.raises(MissingPackageError) as caught:
        data_frame.of([])
    assert str(caught.value) == (
        "A DataFrame needs the package pandas, which is not installed. Install it with: "
        "pip install pandas"
    )
