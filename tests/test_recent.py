"""What is held, and what is dropped when there is more."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import pytest

import remat_opt
from remat_opt.recent import Recent

pytestmark = pytest.mark.usefixtures("quick_search")


def test_what_was_asked_for_the_longest_ago_goes() -> None:
    known: Recent[str, int] = Recent(2)
    known.put("a", 1)
    known.put("b", 2)
    assert known.get("a") == 1
    known.put("c", 3)
    assert (known.get("a"), known.get("b"), known.get("c"), len(known)) == (1, None, 3, 2)


def test_the_first_one_stays() -> None:
    known: Recent[str, list[int]] = Recent(2)
    first = known.put("a", [1])
    assert known.put("a", [1]) is first


def test_threads() -> None:
    known: Recent[int, int] = Recent(4)
    wrong = []

    def work(start: int) -> None:
        for number in range(3000):
            key = (start + number) % 9
            found = known.get(key)
            if (found if found is not None else known.put(key, key * key)) != key * key:
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(known) == 4


def test_one_thread_works_it_out_and_others_wait() -> None:
    known: Recent[str, object] = Recent(2)
    begun, go_on, made = threading.Event(), threading.Event(), []

    def make() -> object:
        begun.set()
        go_on.wait(10)
        made.append(object())
        return made[-1]

    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(known.made("a", make))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    begun.wait(10)
    assert known.made("b", lambda: 1) == 1  # another key does not wait
    go_on.set()
    for thread in threads:
        thread.join()
    assert found == made * 4


def test_what_fails_is_tried_again() -> None:
    known: Recent[str, int] = Recent(2)
    with pytest.raises(KeyError):
        known.made("a", lambda: {"a": 1}["no"])
    assert known.made("a", lambda: 2) == 2
    assert not known._making


def test_a_decorated_function_holds_so_many_plans() -> None:
    fn = remat_opt.optimal_remat(lambda w: jnp.sum(jnp.sin(w)), device="cpu", errors="raise")
    for size in range(1, 67):
        fn.plan(jax.ShapeDtypeStruct((size,), "float32"))
    assert len(fn._plans) == 64
    last = fn.plan(jax.ShapeDtypeStruct((66,), "float32"))
    assert fn.plan(jax.ShapeDtypeStruct((66,), "float32")) is last
