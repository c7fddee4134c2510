"""What was learnt by compiling: sharing it, correcting by it, storing it in files."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from remat_opt.checksum import checksum_of
from remat_opt.compilers import learnt as lessons
from remat_opt.compilers.learnt import Corrections, Key, Learnt, situations
from remat_opt.errors import PlanFileError
from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule, plain
from remat_opt.simulator import Moment, simulate

KEY = Key(fingerprint="f", device="cpu", compiler="jaxlib 1", step="consumed")
#: A chain of two kinds of vertices, in turn.
LABELS = ("dot", "tanh") * 4
CHAIN = Graph.from_edges([100] * 8, [(v, v + 1) for v in range(7)])


def cut(*edges: int, checkpointed: bool = True) -> Schedule:
    """Regions between edges, whose checkpoints keep their last vertex; the rest is free."""
    regions = [
        Region(vertices=tuple(range(a, b)), kept=(b - 1,), checkpointed=checkpointed)
        for a, b in itertools.pairwise(edges)
    ]
    rest = Region(vertices=tuple(range(edges[-1], 8)), checkpointed=False)
    return Schedule(regions=(*regions, rest))


def moments(schedule: Schedule) -> tuple[Moment, ...]:
    return simulate(CHAIN, schedule).moments


def compiled(schedule: Schedule, known: Learnt | None = None, holes: int = 0) -> Learnt:
    """What we learn from a compiler that takes 7 more for each tanh backward, and 2 forward."""
    story = moments(schedule)
    more = {"backward": 7, "forward": 2, "recompute": 0}
    alive = [
        one.live_bytes + (more[one.phase] if LABELS[one.vertex] == "tanh" else 0) for one in story
    ]
    before = known or Learnt(key=KEY, labels=LABELS)
    return before.with_plan(
        CHAIN, schedule, story, alive, model_bytes=0, compiled_bytes=max(alive) + holes
    )


def test_the_schedule_that_was_compiled_is_as_compiled() -> None:
    schedule = cut(0, 4, 6)
    learnt = compiled(schedule, holes=50)
    corrections = Corrections(learnt, CHAIN)
    found = corrections.moments(schedule, moments(schedule))
    assert [one.live_bytes for one in found] == [
        one.live_bytes + {"backward": 7, "forward": 2, "recompute": 0}[one.phase]
        if one.vertex % 2
        else one.live_bytes
        for one in moments(schedule)
    ]
    peak_bytes = corrections.peak_bytes(schedule, moments(schedule))
    assert peak_bytes == max(one.live_bytes for one in found)
    assert corrections.heap_bytes(peak_bytes) == peak_bytes + 50
    assert corrections.compiled_bytes(schedule) == peak_bytes + 50
    assert corrections.compiled_bytes(cut(0, 4)) is None


def test_what_was_not_seen_is_that_of_its_like() -> None:
    corrections = Corrections(compiled(cut(0, 4, 6)), CHAIN)
    # Vertex 5 was the second of two; here it is inside a region of four, as vertex 1 was.
    other = cut(0, 4, 8)
    for vertex, expected in ((4, 0), (5, 7)):
        situation = situations(CHAIN, other)[vertex]
        assert corrections.bytes("backward", situation, vertex) == expected
    assert corrections.bytes("backward", "no such situation", 3) == 7
    assert Corrections(Learnt(key=KEY, labels=LABELS), CHAIN).bytes("backward", "c", 3) == 0


def test_the_nearest_like_counts() -> None:
    schedule = cut(0, 2, 4, 6)
    story = moments(schedule)
    alive = [one.live_bytes + (one.vertex if one.phase == "backward" else 0) for one in story]
    known = Learnt(key=KEY, labels=LABELS).with_plan(
        CHAIN,
        schedule,
        story,
        [None if one.vertex in (0, 1) else live for one, live in zip(story, alive, strict=True)],
        model_bytes=0,
        compiled_bytes=10**4,
    )
    corrections = Corrections(known, CHAIN)
    situation = situations(CHAIN, schedule)
    assert corrections.bytes("backward", situation[1], 1) == 3
    assert corrections.bytes("backward", situation[2], 0) == 2


def test_what_was_learnt_last_goes_first() -> None:
    first = compiled(cut(0, 4))
    story = moments(cut(0, 4))
    second = first.with_plan(
        CHAIN,
        cut(0, 4),
        story,
        [one.live_bytes for one in story],
        model_bytes=0,
        compiled_bytes=500,
    )
    assert {one.bytes for one in first.differences} == {0, 2, 7}
    assert {one.bytes for one in second.differences} == {0}
    assert [one.compiled_bytes for one in second.compiled] == [500]


def test_sizes_alone_are_a_ratio() -> None:
    learnt = Learnt(key=KEY, labels=LABELS)
    for schedule, size in ((cut(0, 4), 1000), (plain(CHAIN), 2000)):
        learnt = learnt.with_plan(
            CHAIN,
            schedule,
            moments(schedule),
            None,
            model_bytes=size,
            compiled_bytes=size * 3 // 2,
        )
    corrections = Corrections(learnt, CHAIN)
    assert not corrections.told
    assert learnt.differences == ()
    assert [corrections.heap_bytes(size) for size in (500, 1500, 4000)] == [750, 2250, 6000]


def test_the_graph_has_it_as_workspace() -> None:
    schedule = cut(0, 4, 6)
    learnt = compiled(schedule)
    (graph,) = dict.fromkeys(Corrections(learnt, CHAIN).graphs(CHAIN, signed=True))
    assert graph.workspace_bytes == (0, 7) * 4
    story = moments(schedule)
    less = learnt.with_plan(
        CHAIN,
        schedule,
        story,
        [one.live_bytes - 30 if one.phase == "backward" else None for one in story],
        model_bytes=0,
        compiled_bytes=1,
    )
    signed, *_ = Corrections(less, CHAIN).graphs(CHAIN, signed=True)
    assert signed.workspace_bytes == (-30,) * 8
    assert simulate(signed, schedule).peak_bytes < simulate(CHAIN, schedule).peak_bytes
    bare, *_ = Corrections(less, CHAIN).graphs(CHAIN, signed=False)
    assert bare.workspace_bytes == (0,) * 8


def test_never_less_than_nothing() -> None:
    schedule = cut(0, 4)
    story = moments(schedule)
    learnt = Learnt(key=KEY, labels=LABELS).with_plan(
        CHAIN, schedule, story, [0] * len(story), model_bytes=0, compiled_bytes=0
    )
    corrections = Corrections(learnt, CHAIN)
    for other in (schedule, cut(0, 2, 4), plain(CHAIN)):
        found = corrections.moments(other, moments(other))
        assert min(one.live_bytes for one in found) >= 0
        assert corrections.peak_bytes(other, moments(other)) >= 0
    for graph in corrections.graphs(CHAIN, signed=True):
        for other in (schedule, cut(0, 2, 4), plain(CHAIN)):
            assert min(one.live_bytes for one in simulate(graph, other).moments) >= 0


def test_situations_tell_nests_apart() -> None:
    inside = (Region(vertices=(0, 1), kept=(1,)), Region(vertices=(2, 3), checkpointed=False))
    nested = Schedule(
        regions=(
            Region(vertices=(0, 1, 2, 3), kept=(3,), inside=inside),
            Region(vertices=(4, 5, 6, 7), checkpointed=False),
        )
    )
    assert situations(CHAIN, nested) == [
        "cc  1", "cc 1 0", "co 0 1", "co 1 0", "o 0 1", "o 1 1", "o 1 1", "o 1 ",
    ]  # fmt: skip


# --- Files ----------------------------------------------------------------------------------


def test_there_and_back(tmp_path: Path) -> None:
    learnt = compiled(cut(0, 4), compiled(cut(0, 4, 6)))
    assert Learnt.from_plain(json.loads(json.dumps(learnt.to_plain()))) == learnt
    path = tmp_path / "learnt.json"
    lessons.write(path, learnt)
    other = dataclasses.replace(learnt, key=dataclasses.replace(KEY, device="v5e"))
    lessons.write(path, other)
    again = dataclasses.replace(other, compiled=())
    lessons.write(path, again)
    assert set(lessons.read(path)) == {learnt, again}
    assert [one.name for one in tmp_path.iterdir()] == ["learnt.json"]


def changed(data: dict[str, Any], *path: Any, to: Any) -> dict[str, Any]:
    at: Any = data
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = to
    return data


@pytest.mark.parametrize(
    ("path", "to"),
    [
        (("key",), None),
        (("key", "device"), 3),
        (("labels",), "dot"),
        (("labels", 0), 1),
        (("differences",), {}),
        (("differences", 0), ["forward", "c", 0]),
        (("differences", 0, 0), "sideways"),
        (("differences", 0, 1), True),
        (("differences", 0, 2), 8),
        (("differences", 0, 3), 1.5),
        (("differences", 0, 3), 2**61),
        (("compiled", 0, 0), [[[0], [9], True, []]]),
        (("compiled", 0, 0), [[[0], [0], 1, []]]),
        (("compiled", 0, 0), 5),
        (("compiled", 0, 1), -1),
        (("compiled", 0, 3), "yes"),
    ],
)
def test_what_is_no_such_data_is_refused(path: tuple[Any, ...], to: Any, tmp_path: Path) -> None:
    data = changed(json.loads(json.dumps(compiled(cut(0, 4)).to_plain())), *path, to=to)
    with pytest.raises(ValueError, match="cannot be read"):
        Learnt.from_plain(data)
    body = [data]
    file = tmp_path / "learnt.json"
    file.write_text(
        json.dumps({"format": lessons.FORMAT, "checksum": checksum_of(body), "learnt": body})
    )
    with pytest.raises(PlanFileError, match="cannot be read"):
        lessons.read(file)


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "learnt.json"
    with pytest.raises(PlanFileError, match="There is no file"):
        lessons.read(path)
    path.write_text('{"form')
    with pytest.raises(PlanFileError, match="cannot be read as what was learnt"):
        lessons.read(path)
    path.write_text('{"format": "remat_opt plan 6", "plan": {}}')
    with pytest.raises(PlanFileError, match="does not hold results of compiling"):
        lessons.read(path)
    lessons.write(tmp_path / "good.json", compiled(cut(0, 4)))
    text = (tmp_path / "good.json").read_text()
    path.write_text(text.replace('"cpu"', '"v5e"'))
    with pytest.raises(PlanFileError, match="was changed after it was written"):
        lessons.read(path)
