"""What happened to recomputation: compilers that undo it, and those that do not."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat_opt
from remat_opt.measurement import compilation
from remat_opt.measurement.survival import survival
from remat_opt.plan import Plan
from remat_opt.recomputation import Recomputation, is_recomputation
from tests.devices import needs_cuda_plugin, needs_libtpu

pytestmark = pytest.mark.usefixtures("quick_search")

SLOW = [pytest.mark.slow, pytest.mark.versions]
DEVICES = [
    "cpu",
    pytest.param("h200", marks=[pytest.mark.cuda, needs_cuda_plugin]),
    pytest.param("v5e", marks=[*SLOW, pytest.mark.tpu, needs_libtpu]),
]
SHAPES = (
    [jax.ShapeDtypeStruct((128, 128), "float32")] * 8,
    jax.ShapeDtypeStruct((512, 128), "float32"),
)


def layers(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w) + x
    return jnp.sum(x**2)


def planned(device: str) -> Plan:
    return remat_opt.make_plan(layers, *SHAPES, budget=0.5, device=device, verify=True)


def recomputed_products(plan: Plan) -> int:
    """How many products the plan says are computed again."""
    return sum(d.times for d in plan.decisions if d.label.startswith("dot_general"))


# --- With real compilers ------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_a_plan_survives(device: str) -> None:
    plan = planned(device)
    assert plan.measured is not None
    found = plan.measured.recomputation
    assert found == Recomputation(
        asked_products=recomputed_products(plan),
        compiled_products=recomputed_products(plan),
        early_values=0,
        compiler_values=0,
    )
    assert found.asked_products > 0
    assert not found.undone
    assert not any("undone" in note for note in plan.measured.notes)
    assert "\nsurvived " in repr(plan)


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="JAX before 0.11 undoes it on CPU")
def test_a_plan_that_the_compiler_undid(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = planned("cpu")
    monkeypatch.setattr(compilation, "compiler_options", lambda device: {})
    undone = planned("cpu")
    assert undone.stages == kept.stages
    assert undone.measured is not None
    assert kept.measured is not None
    found = undone.measured.recomputation
    assert found is not None
    assert found.undone
    assert found.asked_products == recomputed_products(undone)
    assert 0 < found.merged_products <= found.asked_products
    assert found.early_values > 0
    # That is what it means: the memory is that of the unchanged function.
    plain = compilation.measure(jax.value_and_grad(layers), *SHAPES, device="cpu")
    assert undone.measured.temporary_bytes > 0.9 * plain.temporary_bytes
    assert kept.measured.temporary_bytes < 0.6 * plain.temporary_bytes
    assert undone.measured.notes == (
        f"recomputation is undone, in whole or in part: {found.text()}. The memory it was "
        "meant to save is not saved, whatever is predicted. Plan for another budget, or with "
        'verify="compile", which chooses the plan that compiles best',
    )
    assert undone.measured.notes[0] in " ".join(repr(undone).split())
    assert "\nsurvived" not in repr(undone)
    assert Plan.from_json(undone.to_json()) == undone


def in_a_loop(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """A checkpointed body in a loop, and a jitted function that is called twice."""

    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    head = jax.jit(lambda x: jnp.tanh(x @ weights[0]))
    x, _ = jax.lax.scan(jax.checkpoint(body), x, jnp.stack(weights))
    return jnp.sum(jax.checkpoint(head)(jax.checkpoint(head)(x)) ** 2)


def of_two_heads(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """One head is linear: its backward pass may begin before the other has run forward."""
    for start in range(0, 8, 2):
        x = jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]))(
            weights[start : start + 2], x
        )
    return jnp.sum(x) + jnp.sum(jnp.sin(x @ weights[0]))


def with_vectors(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Compilers turn products with a vector into sums, or lose their names."""

    @jax.checkpoint
    def region(w: jax.Array, x: jax.Array) -> jax.Array:
        x = jnp.tanh(x @ w)
        return x * jnp.tanh(x @ w[0])[:, None]

    return jnp.sum(region(weights[1], region(weights[0], x)) ** 2)


def with_common_factors(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Some compilers merge products with a common factor; all merge equal ones."""

    @jax.checkpoint
    def region(x: jax.Array) -> jax.Array:
        a, b, c = (x @ weights[n] for n in (0, 1, 0))
        return jnp.tanh(a) + jnp.sin(b) * jnp.cos(c)

    return jnp.sum(region(region(x)) ** 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("fn", "products"),
    [
        (layers, None),
        (in_a_loop, 3),
        (of_two_heads, 8),
        (with_vectors, 2),
        (with_common_factors, 6),
    ],
)
def test_checkpoints_of_others(fn: Callable[..., Any], products: int | None, device: str) -> None:
    found = compilation.measure(jax.value_and_grad(fn), *SHAPES, device=device).recomputation
    assert found == (
        None
        if products is None
        else Recomputation(
            asked_products=products,
            compiled_products=products,
            early_values=0,
            compiler_values=0,
        )
    )


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.tpu
@needs_libtpu
def test_the_compilers_own_rematerialisation(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = jax.ShapeDtypeStruct((256, 256), "float32")
    x = jax.ShapeDtypeStruct((2**18, 256), "float32")
    arguments = (jax.value_and_grad(layers), [weight] * 4, x)
    roomy = compilation.measure(*arguments, device="v5e")
    assert roomy.recomputation is None
    room = 0.8 * roomy.device_bytes / 2**20
    monkeypatch.setattr(
        compilation, "compiler_options", lambda device: {"xla_tpu_max_hbm_size_mib": round(room)}
    )
    tight = compilation.measure(*arguments, device="v5e")
    assert tight.recomputation is not None
    assert tight.recomputation.asked_products == 0
    assert tight.recomputation.compiler_values > 0
    assert set(tight.recomputation.not_kept) <= {"sum", "matrix product", "tanh"}
    assert tight.recomputation.not_kept
    assert tight.notes[-1] == (
        f"the compiler's own rematerialisation computes {tight.recomputation.compiler_values} "
        f"more values again ({', '.join(tight.recomputation.not_kept)}), as it does when the "
        "device's memory runs short; a plan with a smaller budget leaves it less to do"
    )


# --- On texts -----------------------------------------------------------------------------

#: A private function computes a product forward, twice, and again under a checkpoint.
ASKED = """
    func.func public @main(%arg0: tensor<8x8xf32>) -> (tensor<8x8xf32>) {
      %0 = call @"layer_<0>"(%arg0) : (tensor<8x8xf32>) -> tensor<8x8xf32> loc(#loc1)
      %1 = call @"layer_<0>"(%0) : (tensor<8x8xf32>) -> tensor<8x8xf32> loc(#loc1)
      %2 = call @"layer_<0>"(%arg0) : (tensor<8x8xf32>) -> tensor<8x8xf32> loc(#loc2)
      %3 = stablehlo.convolution(%1, %2) : tensor<8x8xf32> loc(#loc3)
    }
    func.func private @"layer_<0>"(%arg0: tensor<8x8xf32>) -> tensor<8x8xf32> {
      %0 = stablehlo.dot_general %arg0, %arg0 : tensor<8x8xf32> loc(#loc4)
    }
#loc1 = loc("jit(f)/jvp()/layer")
#loc2 = loc("jit(f)/transpose(jvp())/checkpoint/rematted_computation/layer"(#loc1))
#loc3 = loc("jit(f)/transpose(jvp())/conv_general_dilated"(#loc1))
#loc4 = loc("dot_general"(#loc1))
"""

FORWARD = 'metadata={op_name="jit(f)/jvp()/layer/dot_general"}'
AGAIN = 'metadata={op_name="jit(f)/transpose(jvp())/checkpoint/rematted_computation/dot_general"}'
BACKWARD = 'metadata={op_name="jit(f)/transpose(jvp())/conv_general_dilated"}'
FIRST = f"%a = f32[8,8]{{1,0:T(8,128)}} dot(%x), {FORWARD}"
SECOND = f"%b = f32[8,8]{{1,0}} fusion(%a), kind=kOutput, calls=%fused, {FORWARD}"
THIRD = f'%c = (f32[8,8], u8[0]) custom-call(%x), custom_call_target="__cublas$gemm", {AGAIN}'
HANDED_ON = "%d = f32[8,8]{1,0} get-tuple-element(%c), index=0"
LAST = f'%e = f32[8,8]{{1,0}} convolution(%d, %b), {BACKWARD}, backend_config={{"a":"%c"}}'


def compiled(*steps: str, fused: str = "%g = f32[8,8]{1,0} convolution(%p)") -> str:
    return textwrap.dedent(
        """\
        HloModule jit_f, is_scheduled=true

        %fused (p: f32[8,8]) -> f32[8,8] {{
          %p = f32[8,8]{{1,0}} parameter(0)
          ROOT {fused}
        }}

        ENTRY %main (x: f32[8,8]) -> f32[8,8] {{
          %x = f32[8,8]{{1,0}} parameter(0)
          {steps}
        }}
        """
    ).format(fused=fused, steps="\n  ".join(steps))


def record(
    compiled_products: int,
    early_values: int,
    compiler_values: int = 0,
    not_kept: tuple[str, ...] = (),
) -> Recomputation:
    return Recomputation(
        asked_products=1,
        compiled_products=compiled_products,
        early_values=early_values,
        compiler_values=compiler_values,
        merged=() if compiled_products else ("matrix product in layer",),
        not_kept=not_kept,
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (compiled(FIRST, SECOND, THIRD, HANDED_ON, LAST), record(1, 0)),
        # What the forward pass made is read instead.
        (compiled(FIRST, SECOND, LAST.replace("%d", "%a")), record(0, 0)),
        # It waits, passed on by a get-tuple-element, while the second forward product runs.
        (compiled(FIRST, THIRD, HANDED_ON, SECOND, LAST), record(1, 1)),
        (compiled(THIRD, FIRST, SECOND, HANDED_ON, LAST), record(1, 1)),
        # A constant may be made at any time.
        (
            compiled(f"%k = f32[8] iota(), {AGAIN}", FIRST, SECOND, THIRD, HANDED_ON, LAST),
            record(1, 0),
        ),
        # A name was lost, but all products are there.
        (
            compiled(FIRST, SECOND, THIRD.replace(f", {AGAIN}", ""), HANDED_ON, LAST),
            record(1, 0),
        ),
        # One of the others is missing too: there may be several reasons.
        (compiled(FIRST, LAST.replace("%d", "%a").replace("%b", "%a")), record(1, 0)),
        # The compiler's own copy; one inside a fusion is not an array.
        (
            compiled(
                *(FIRST, SECOND, "%b.remat2 = f32[8] tanh(%a)", THIRD, HANDED_ON, LAST),
                fused="%g.remat = f32[8,8]{1,0} convolution(%p)",
            ),
            record(1, 0, 1),
        ),
        # Two of them, of one layer.
        (
            compiled(
                *(FIRST, SECOND, f"%b.remat = f32[8] tanh(%a), {FORWARD}"),
                *(f"%b.remat2 = f32[8] tanh(%a), {FORWARD}", THIRD, HANDED_ON, LAST),
            ),
            record(1, 0, 2, ("matrix product in layer",)),
        ),
    ],
)
def test_texts(text: str, expected: Recomputation) -> None:
    assert survival(ASKED, text) == expected


def test_no_recomputation_asked_for() -> None:
    asked = ASKED.replace("rematted_computation", "")
    assert survival(asked, compiled(FIRST, SECOND, THIRD, HANDED_ON, LAST)) is None


def test_words() -> None:
    assert record(0, 2).text() == (
        "0 of 1 matrix products and convolutions that were to be computed again are, the others "
        "are merged with the originals (matrix product in layer); 2 recomputed values are already "
        "computed during the forward pass, and wait"
    )
    none = Recomputation(asked_products=0, compiled_products=0, early_values=0, compiler_values=0)
    assert none.text() == "no matrix product or convolution was meant to be computed again"
    assert not none.undone
    assert not is_recomputation({"asked_products": True})
