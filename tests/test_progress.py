"""The line about what is being worked on: in a terminal only, and gone at the end."""

from __future__ import annotations

import io
import time
import types

import jax
import jax.numpy as jnp
import pytest

import remat_opt
from remat_opt import progress

pytestmark = pytest.mark.usefixtures("quick_search")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    monkeypatch.setattr(progress, "_AT_FIRST", 0.01)
    monkeypatch.setattr(progress, "_EVERY", 0.01)
    found = Terminal()
    # Not sys.stderr itself: pytest replaces it for each phase of a test.
    monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stderr=found))
    return found


def wait_for(terminal, text):
    end = time.monotonic() + 10
    while text not in terminal.getvalue():
        assert time.monotonic() < end, terminal.getvalue()
        time.sleep(0.005)


def test_one_line_rewritten_and_cleared(terminal):
    with progress.doing("compiling step for h200"):
        wait_for(terminal, "compiling step for h200, ")
    written = terminal.getvalue()
    assert written.startswith("\r\x1b[Kremat_opt: compiling step for h200, ")
    assert written.endswith("\r\x1b[K")
    assert "\n" not in written


def test_work_inside_other_work_stands_behind_it(terminal):
    with progress.doing("outer"):
        wait_for(terminal, "outer, ")
        with progress.doing("inner"):
            wait_for(terminal, "remat_opt: outer: inner, ")
            before = terminal.getvalue().count("outer, ")
            time.sleep(0.05)
            assert terminal.getvalue().count("outer, ") == before
    assert progress._work == []


def test_work_that_fails_leaves_no_line(terminal):
    def fail():
        with progress.doing("failing"):
            wait_for(terminal, "failing")
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert progress._work == []


def test_a_long_line_stays_one(terminal):
    with progress.doing("x" * 500):
        wait_for(terminal, "x")
    lines = terminal.getvalue().split("\r\x1b[K")
    assert max(map(len, lines)) == 78


def test_off_by_the_environment(terminal, monkeypatch):
    monkeypatch.setenv(progress.VARIABLE, "0")
    with progress.doing("something"):
        time.sleep(0.05)
    assert terminal.getvalue() == ""


def test_quiet_where_there_is_no_terminal(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stderr=log))
    with progress.doing("something"):
        time.sleep(0.02)
    assert log.getvalue() == ""


def test_a_terminal_that_goes_away(terminal):
    with progress.doing("something"):
        wait_for(terminal, "something")
        terminal.close()


def test_long_work_says_what_it_is(terminal, monkeypatch):
    """Planning and compiling; shown or not, the plan is the same."""

    def loss(w, x):
        for _ in range(7):
            x = jnp.sin(x @ w)
        return jnp.sum(x)

    shapes = [jax.ShapeDtypeStruct((64, 64), "float32")] * 2
    plan = remat_opt.make_plan(loss, *shapes, device="cpu", verify=True)
    written = terminal.getvalue()
    assert "compiling step for cpu" in written
    assert "planning loss for cpu" in written
    monkeypatch.setenv(progress.VARIABLE, "0")
    quiet = remat_opt.make_plan(loss, *shapes, device="cpu", verify=True)
    assert quiet == plan
