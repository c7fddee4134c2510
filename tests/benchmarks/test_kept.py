"""The compiler is asked only once."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.kept import Kept
from remat_opt.measurement import compilation
from tests.programs import ones

X = ones(64, 64)


def test_measurements_outlive_the_run(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    key = Kept.key("cpu", jnp.sin, (X,))
    assert Kept(path).get(key) is None
    found = compilation.measure(jnp.sin, X, device="cpu")
    Kept(path).put(key, found)
    assert Kept(path).get(key) == found
    assert Kept(path).get(Kept.key("cpu", jnp.cos, (X,))) is None


def test_programs_are_told_apart_and_nothing_else() -> None:
    def named(x: jax.Array, scale: float) -> jax.Array:
        policy = jax.checkpoint_policies.save_only_these_names("y")
        return jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x * scale)), policy=policy)(x))

    def key(scale: float, device: str = "cpu") -> str:
        return Kept.key(device, jax.grad(lambda x: named(x, scale)), (X,))

    # The policy is a new object each time.
    assert key(2.0) == key(2.0)
    assert len({key(2.0), key(3.0), key(2.0, "h200")}) == 3
    assert Kept.key("cpu", jnp.sin, (X,)) != Kept.key("cpu", jnp.sin, (X[:32],))


def test_what_a_checkpoint_keeps_tells_programs_apart() -> None:
    def gradient(name: str) -> object:
        policy = jax.checkpoint_policies.save_only_these_names(name)

        def loss(x: jax.Array) -> jax.Array:
            y = jax.ad_checkpoint.checkpoint_name(jnp.sin(x), "y")
            return jnp.sum(jnp.sin(jax.ad_checkpoint.checkpoint_name(jnp.sin(y), "z")))

        return jax.grad(jax.checkpoint(loss, policy=policy))

    assert len({Kept.key("cpu", gradient(name), (X,)) for name in ("x", "y", "z")}) == 3


def test_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    keys = [Kept.key("cpu", fn, (X,)) for fn in (jnp.sin, jnp.cos)]
    found = compilation.measure(jnp.sin, X, device="cpu")
    Kept(path).put(keys[0], found)
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole + whole[:40], encoding="utf-8")
    Kept(path).put(keys[1], found)
    assert [Kept(path).get(key) for key in keys] == [found, found]
