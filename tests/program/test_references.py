"""What a function refers to: what changes it, what does not, and what cannot be seen."""

from __future__ import annotations

import functools
import importlib
import math
import random
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat_opt.program.references import references
from tests.programs import ones

SCALE = 2.0
TABLES = [ones(3), jnp.zeros(3)]
NUMBERS = np.ones(3)
OWN = types.ModuleType("own")
OWN.__file__ = "/somewhere/own.py"
OWN.factor = 1.0  # type: ignore[attr-defined]


def helper(x: Any) -> Any:
    return x * SCALE


class Model:
    bias = 0.5

    def __init__(self) -> None:
        self.scale = 1.0
        self.parts = {"a": jnp.ones(2)}

    def part(self, x: Any) -> Any:
        return helper(x) + self.bias

    def loss(self, x: Any) -> Any:
        return self.part(x) * self.scale


class Network(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return SCALE * nn.Dense(self.width)(x)


@jax.custom_vjp
def ruled(x: Any) -> Any:
    return x


ruled.defvjp(lambda x: (x, None), lambda _, g: (SCALE * g,))


def closed(value: Any) -> Callable[..., Any]:
    return lambda x: x + value


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "a global": helper,
    "a function that is called": lambda x: helper(x),
    "an inner function": lambda x: (lambda y: helper(y))(x),
    "under jit": jax.jit(lambda x: helper(x)),
    "a partial": functools.partial(lambda x, y: helper(x) + y, y=1),
    "a rule": lambda x: ruled(x),
    "a method": Model().loss,
    "a network": Network(3).apply,
    "a class": lambda x: Model().loss(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_global_that_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn = FUNCTIONS[name]
    before = references(fn)
    assert before is not None
    assert references(fn) == before
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert references(fn) != before
    monkeypatch.undo()
    assert references(fn) == before


def changes() -> Iterator[Any]:
    model = Model()
    yield "an attribute", model.loss, lambda: setattr(model, "scale", 2.0)
    other = Model()
    yield "a container in it", other.loss, lambda: other.parts.update(a=jnp.ones(2))
    yield "a class's attribute", Model().loss, lambda: setattr(Model, "bias", 0.7)
    tables = [jnp.ones(2)]
    yield "a list", lambda x: x + tables[0], lambda: tables.append(jnp.ones(2))
    numbers = np.ones(3)
    yield "an array in place", closed(numbers), lambda: numbers.fill(2)
    nested = closed([{"a": [numbers]}])
    yield "deep inside", nested, lambda: numbers.fill(3)
    cell = 1.0

    def reads(x: Any) -> Any:
        return x + cell

    def write() -> None:
        nonlocal cell
        cell = 2.0

    yield "what is closed over", reads, write
    yield "a module", lambda x: x * OWN.factor, lambda: setattr(OWN, "factor", 2.0)


@pytest.mark.parametrize(("fn", "change"), [pytest.param(*c, id=name) for name, *c in changes()])
def test_what_changes(fn: Callable[..., Any], change: Callable[[], Any]) -> None:
    before = references(fn)
    assert before is not None
    assert references(fn) == before
    change()
    assert references(fn) != before


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of a user's package, which is not installed."""
    folder = tmp_path / "a_project"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "settings.py").write_text("scale = 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("a_project", "a_project.settings"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("a_project.settings")


def test_modules_wherever_they_are_found(
    settings: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a closure, as an attribute, a default, a part of a package, or imported as code runs."""
    package = sys.modules["a_project"]

    class Trainer:
        def __init__(self) -> None:
            self.settings = settings

        def loss(self, x):
            return x * self.settings.scale

    def by_default(x, given=settings):
        return x * given.scale

    def imported(x):
        from a_project import settings  # type: ignore[import-not-found]

        return x * settings.scale

    found = (
        lambda x: x * settings.scale,
        lambda x: x * package.settings.scale,
        Trainer().loss,
        by_default,
        imported,
    )
    before = [references(fn) for fn in found]
    assert before == [references(fn) for fn in found]
    assert None not in before
    monkeypatch.setattr(settings, "scale", 2.0)
    assert all(was != references(fn) for was, fn in zip(before, found, strict=True))


def test_what_is_made_anew_with_the_same_contents_is_the_same() -> None:
    array = jnp.ones(3)
    assert references(closed([array, 1.0])) == references(closed([array, 1.0]))
    assert references(closed(array)) != references(closed(jnp.ones(3)))
    assert references(Model.loss) == references(Model.loss)
    # True equals 1, but a program with one is not a program with the other.
    assert references(closed(True)) != references(closed(1))


def test_what_cannot_be_seen() -> None:
    generator = np.random.default_rng(0)
    for unseen in (
        iter([1]),
        generator,
        np.zeros(100_000),
        {object(), 1},
        jax.new_ref(jnp.ones(1)),
    ):
        assert references(closed(unseen)) is None
    seen = []
    jax.make_jaxpr(lambda x: seen.append(references(closed(x))) or x)(1.0)
    assert seen == [None]


def test_arrays_that_are_covered() -> None:
    array, numbers = jnp.ones(3), np.ones(3)
    found = references(closed((array, numbers)))
    assert found is not None
    assert found.cover([array, numbers])
    assert not found.cover([array, jnp.ones(3)])


def test_what_refers_to_itself() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    before = references(closed(loop))
    assert before is not None
    assert references(closed(loop)) == before


def test_what_is_bound_to_something_that_changes_is_no_constant() -> None:
    """``random.random`` is a C function, bound to a generator."""
    assert references(random.random) is None
    numbers = [1, 2]
    before = references(numbers.index)
    assert before is not None
    assert before == references(numbers.index)
    numbers.append(3)
    assert before != references(numbers.index)
    assert references(math.sin) == references(math.sin)
