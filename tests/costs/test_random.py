"""Random bits cost what the compiler says before CPU rolls the generator's rounds into a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.costs import Fusion, cost

KEYS = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 40))
KEY = jax.eval_shape(lambda: jax.random.key(0))

CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "bits": (lambda key: jax.random.bits(key, (1000,)), (KEY,)),
    "bits of 8": (lambda key: jax.random.bits(key, (30, 20), jnp.uint8), (KEY,)),
    "bits of many keys": (jax.vmap(jax.random.bits), (KEYS,)),
    "split": (lambda key: jax.random.split(key, 50), (KEY,)),
    "fold in": (
        jax.vmap(jax.random.fold_in),
        (KEYS, jax.ShapeDtypeStruct((40,), jnp.uint32)),
    ),
    "uniform": (lambda key: jax.random.uniform(key, (40, 40)), (KEY,)),
    "bernoulli": (lambda key: jax.random.bernoulli(key, 0.9, (2000,)), (KEY,)),
}


@pytest.mark.parametrize("name", CASES)
def test_flops_are_the_compilers_within_3_percent(name: str, ours: Any, unexpanded: Any) -> None:
    fn, args = CASES[name]
    assert ours(fn, *args).flops == pytest.approx(unexpanded(fn, *args).flops, rel=0.03)


@pytest.mark.parametrize("name", ["bits", "split", "fold in"])
def test_fusible(name: str, operations: Any) -> None:
    fn, args = CASES[name]
    answer = cost(operations(fn, *args)[-1])
    assert answer.fusion is Fusion.FUSIBLE
    assert not answer.estimated


def test_numbers_of_64_bits_take_two_hashes(only: Any) -> None:
    with jax.enable_x64(True):
        operation = only(lambda key: jax.random.bits(key, (10,), jnp.uint64), KEY)
    assert cost(operation).flops == 2 * 121 * 10


def test_hardware_generator_is_the_cpu_compilers_within_5_percent(
    only: Any, ours: Any, compiled: Any
) -> None:
    state = jax.ShapeDtypeStruct((4,), jnp.uint32)

    def bits(state: jax.Array) -> Any:
        return lax.rng_bit_generator(state, (4096,))

    assert ours(bits, state).flops == pytest.approx(compiled(bits, state).flops, rel=0.05)
    assert cost(only(bits, state)).estimated


def test_a_key_is_made_from_an_integer_with_few_flops(ours: Any, compiled: Any) -> None:
    seed = jax.ShapeDtypeStruct((), jnp.uint32)

    def key_data(seed: jax.Array) -> Any:
        return jax.random.key_data(jax.random.key(seed))

    assert abs(ours(key_data, seed).flops - compiled(key_data, seed).flops) <= 3
