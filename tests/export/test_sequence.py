"""Calls become lines: names of values are reused, and repetition becomes a loop."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from remat_opt.export.functions import Functions
from remat_opt.export.paths import paths_of
from remat_opt.export.sequence import Item, lines_of


def written(items, given_values, wanted, words=None):
    hint = (words or {}).get
    return lines_of(items, given_values, lambda v: hint(v, "x"), Functions().distinct, wanted)


def layers(count, offset=0):
    """Paths to two arrays of each layer, by value, and calls that run the layers in turn."""
    params = [{"scale": object(), "kernel": object()} for _ in range(count)]
    paths = paths_of("params", params)
    given_values = dict(enumerate(paths)) | {100: "batch"}
    items = [
        Item(
            function="layer",
            reads=(100 + n, 2 * (n + offset), 2 * (n + offset) + 1),
            writes=(101 + n,),
        )
        for n in range(count - offset)
    ]
    return items, given_values, 100 + count - offset


def test_layers_in_turn_are_a_loop():
    items, given_values, last = layers(5)
    lines, known = written(items, given_values, [last])
    # The first reads the batch, each other one the result before it.
    assert lines == [
        'x = layer(batch, params[0]["kernel"], params[0]["scale"])',
        "for i in range(1, 5):",
        '    x = layer(x, params[i]["kernel"], params[i]["scale"])',
    ]
    assert known[last] == "x"


def test_a_value_that_is_read_later_keeps_its_name():
    items = [
        Item(function="first", reads=(0,), writes=(1,)),
        Item(function="second", reads=(1,), writes=(2,)),
        Item(function="third", reads=(2, 1), writes=(3,)),
    ]
    lines, _ = written(items, {0: "batch"}, [3])
    assert lines == ["x = first(batch)", "x_1 = second(x)", "x = third(x_1, x)"]


def test_a_part_with_many_arrays_has_a_name():
    params = {"Block_0": {"a": 1, "b": 2, "c": 3}, "Block_1": {"a": 4, "b": 5, "c": 6}}
    paths = paths_of("params", params)
    items = [
        Item(function="run", reads=(10, 0, 1, 2), writes=(10,), unpack=True),
        Item(function="run", reads=(10, 3, 4, 5), writes=(10,), unpack=True),
    ]
    lines, _ = written(items, dict(enumerate(paths)) | {10: "h"}, [10])
    assert lines == [
        "for i in range(2):",
        '    block = params[f"Block_{i}"]',
        '    h = run(h, block["a"], block["b"], block["c"])',
    ]


def test_an_argument_that_code_cannot_step_into_has_no_paths():
    class Box:
        pass

    assert paths_of("box", {Box(): 1}) is None


@st.composite
def programs(draw):
    """Calls of a few functions on layers and on values that were made before."""
    count = draw(st.integers(2, 7))
    items = []
    for number in range(count * 3):
        made = [100 + n for n in range(number + 1)]
        reads = draw(st.lists(st.sampled_from(made[-3:]), min_size=1, max_size=2))
        if draw(st.booleans()):
            reads.append(min(number // 2, count * 2 - 1))
        function = draw(st.sampled_from("fg"))
        items.append(Item(function=function, reads=tuple(reads), writes=(101 + number,)))
    return count, items


@given(programs())
def test_lines_do_as_the_calls(program):
    count, items = program
    leaves = itertools.count()
    params = [{"a": next(leaves), "b": next(leaves)} for _ in range(count)]
    given_values = dict(enumerate(paths_of("params", params))) | {100: "batch"}
    last = items[-1].writes[0]
    lines, known = written(items, given_values, [last, 101])
    calls = {"f": lambda *xs: ("f", *xs), "g": lambda *xs: ("g", *xs)}
    scope = {"params": params, "batch": "batch", **calls}
    exec("\n".join(lines), scope)

    values = {value: value for value in range(2 * count)} | {100: "batch"}
    for item in items:
        (written_value,) = item.writes
        values[written_value] = (item.function, *(values[value] for value in item.reads))
    assert scope[known[last]] == values[last]
    assert scope[known[101]] == values[101]
