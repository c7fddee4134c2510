"""What a convolution library receives in another form."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from remat_opt.compilers.convolutions import CopiedOperands
from remat_opt.schedule import Region, Schedule, plain
from remat_opt.spans import spans
from tests.compiler_graphs import InStep, changed, graph_of, names, whole
from tests.devices import needs_cuda_plugin
from tests.programs import convolved, ones

IMAGES, KERNEL = ones(2, 8, 8, 4), ones(3, 3, 4, 4)


def layers(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
    for kernel in kernels:
        x = jnp.tanh(convolved(x, kernel))
    return jnp.sum(x)


def strided(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
    x = jnp.tanh(convolved(x, kernels[0]))
    return jnp.sum(jnp.sin(convolved(x, kernels[1], 2)))


def test_copies_of_weights_wait_for_the_gradients_of_operands() -> None:
    _, _, graph = graph_of(layers, [KERNEL] * 4, IMAGES)
    convolutions = [v for v, one in enumerate(names(graph)) if one == "conv_general_dilated"]
    size = KERNEL.nbytes
    # The first needs no gradient of its operand: the images are not differentiated.
    held = [graph.workspace_bytes[v] for v in convolutions]
    assert np.diff(held).tolist() == [size] * 3
    # Then they wait for the end of the forward pass, when all exist.
    assert graph.workspace_bytes[-1] == held[-1] == 3 * size
    _, _, other = graph_of(layers, [KERNEL] * 4, IMAGES, device="v5e")
    assert not any(other.workspace_bytes), "no library is called there"


def test_an_operand_that_is_padded_behind_is_there_twice() -> None:
    _, found, graph = graph_of(strided, [KERNEL] * 2, IMAGES)
    (effect,) = (one for one in found.effects if isinstance(one, CopiedOperands))
    ((by, copy),) = effect.copies.items()
    operand, size = copy.operand, copy.bytes
    assert names(graph)[by] == "conv_general_dilated"
    assert graph.bytes[operand] == IMAGES.nbytes
    # One more row and column at the end.
    assert size == 4 * 2 * 9 * 9 * 4
    in_the_open = changed(found, plain(graph))
    # The operand is read backward without its padding, too.
    assert not effect.alone
    assert in_the_open.bytes[operand] == IMAGES.nbytes + size
    assert in_the_open.workspace_bytes == graph.workspace_bytes
    again = changed(found, whole(graph))
    assert again.bytes == graph.bytes
    assert again.workspace_bytes[by] == graph.workspace_bytes[by] + size
    # Only the convolution's position counts.
    every = range(len(graph))
    cut = Schedule(
        regions=(
            Region(vertices=tuple(every[:by])),
            Region(vertices=tuple(every[by:]), checkpointed=False),
        )
    )
    assert changed(found, cut).bytes == in_the_open.bytes


def causal(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
    def convolution(kernel: jax.Array, x: jax.Array, dilation: int) -> jax.Array:
        return lax.conv_general_dilated(
            x,
            kernel,
            (1,),
            [(dilation, 0)],
            rhs_dilation=(dilation,),
            dimension_numbers=("NWC", "WIO", "NWC"),
        )

    first, second, other = kernels
    x = convolution(first, x, 1) + x
    return jnp.sum(jnp.sin(convolution(second, x, 4)) * jnp.sin(convolution(other, x, 4)))


def test_convolutions_that_pad_alike_have_one_copy_in_place_of_their_operand() -> None:
    sequence = jnp.ones((2, 32, 4))
    kernel = jnp.ones((2, 4, 4))
    _, found, graph = graph_of(causal, [kernel] * 3, sequence)
    (effect,) = (one for one in found.effects if isinstance(one, CopiedOperands))
    operand = names(graph).index("add")
    by = [vertex for vertex, copy in effect.copies.items() if copy.operand == operand]
    assert len(by) == 2
    in_the_open = changed(found, plain(graph))
    padded = 4 * 2 * (32 + 4) * 4
    assert graph.bytes[operand] == sequence.nbytes
    # Nothing else reads the operand backward.
    assert effect.alone == {operand}
    assert in_the_open.bytes[operand] == padded
    again = changed(found, whole(graph))
    assert again.bytes == graph.bytes
    assert [again.workspace_bytes[v] - graph.workspace_bytes[v] for v in by] == [padded] * 2


def test_even_padding_needs_no_copy() -> None:
    _, found, _ = graph_of(layers, [KERNEL] * 2, IMAGES)
    assert not [one for one in found.effects if isinstance(one, CopiedOperands)]


def dilated(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
    """A convolution, and two that read its result: one of them with holes in its kernel."""
    y = jnp.tanh(convolved(x, kernels[0]))
    with_holes = convolved(y, kernels[1], dilation=2)
    return jnp.sum(jnp.sin(with_holes) + jnp.sin(convolved(y, kernels[2])))


def test_a_kernel_with_holes_reads_its_operand_and_cotangent_transposed() -> None:
    _, found, graph = graph_of(dilated, [KERNEL] * 3, IMAGES)
    (effect,) = (one for one in found.effects if isinstance(one, CopiedOperands))
    ((by, copy),) = effect.copies.items()
    size = IMAGES.nbytes
    assert (copy.bytes, copy.padding) == (size, ())
    in_the_open = changed(found, plain(graph))
    # The convolution without holes reads the operand as it is.
    assert not effect.alone
    assert in_the_open.bytes[copy.operand] == graph.bytes[copy.operand] + size
    assert in_the_open.cotangent_bytes[by] == graph.cotangent_bytes[by] + size
    again = changed(found, whole(graph))
    assert again.bytes == graph.bytes
    assert again.workspace_bytes[by] == graph.workspace_bytes[by] + size
    # What comes from outside a checkpoint is transposed when it is read.
    every = range(len(graph))
    cut = Schedule(
        regions=(
            Region(vertices=tuple(every[: by + 1])),
            Region(vertices=tuple(every[by + 1 :]), checkpointed=False),
        )
    )
    assert changed(found, cut).cotangent_bytes == graph.cotangent_bytes
    assert changed(found, cut).workspace_bytes[by] == graph.workspace_bytes[by] + 2 * size
    for device in ("v5e", "cpu"):
        _, other, _ = graph_of(dilated, [KERNEL] * 3, IMAGES, device=device)
        assert not [one for one in other.effects if isinstance(one, CopiedOperands)]


def widened(kernels: list[jax.Array], x: jax.Array, reversed_too: bool = False) -> jax.Array:
    """An operand with zeros in between, as in a decoder."""
    y = jnp.tanh(convolved(x, kernels[0]))
    transposed = lax.conv_transpose(y, kernels[1], (2, 2), "SAME", transpose_kernel=reversed_too)
    return jnp.sum(jnp.sin(transposed))


@pytest.mark.parametrize("reversed_too", [False, True])
def test_a_transposed_convolution(reversed_too: bool) -> None:
    kernels = [KERNEL, ones(4, 4, 4, 4)]
    loss = functools.partial(widened, reversed_too=reversed_too)
    _, found, graph = graph_of(loss, kernels, IMAGES)
    (effect,) = (one for one in found.effects if isinstance(one, CopiedOperands))
    ((by, copy),) = effect.copies.items()
    # Its weight's gradient reads both transposed.
    assert (copy.bytes, copy.padding) == (IMAGES.nbytes, ())
    in_the_open = changed(found, plain(graph))
    assert in_the_open.cotangent_bytes[by] == 2 * graph.cotangent_bytes[by] == 8 * IMAGES.nbytes
    # With its zeros and padding, the operand has 8 + 7 + 4 rows and columns.
    spread = {} if reversed_too else {by: 4 * 2 * 19 * 19 * 4}
    assert found.running == spread
    for device in ("v5e", "cpu"):
        _, other, _ = graph_of(loss, kernels, IMAGES, device=device)
        assert not other.running


def test_an_operand_is_spread_whenever_it_runs() -> None:
    # One channel is left, so that nothing takes more than the operand with its zeros.
    _, found, graph = graph_of(widened, [KERNEL, ones(4, 4, 4, 1)], ones(64, 8, 8, 4))
    alone = dataclasses.replace(found, running={})
    ((by, size),) = found.running.items()
    # The operand itself is there too, and in the backward pass what is kept beside.
    for schedule in (plain(graph), whole(graph)):
        assert alone.peak_bytes(schedule) < size < found.peak_bytes(schedule)
    lives = spans(graph, whole(graph))
    runs = lives.with_runs({by: size})
    steps = lives.turn.max() + 1
    more = runs.live_bytes(steps) - lives.live_bytes(steps)
    assert np.flatnonzero(more).tolist() == [by, len(graph) + by]
    assert set(more.tolist()) == {0, size}


@pytest.mark.slow
@pytest.mark.cuda
@needs_cuda_plugin
@pytest.mark.parametrize("size", [2, 4])
def test_a_decoder_takes_what_was_predicted(size: int) -> None:
    def loss(kernels: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
        for up, down in kernels:
            x = lax.conv_transpose(jnp.sin(x), up, (2, 2), "SAME")
            x = convolved(jnp.sin(x), down, 2)
        return jnp.mean(x * x)

    shape = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
    kernels = [(shape((size, size, 64, 64)), shape((2, 2, 64, 64)))] * 3
    step = InStep(loss, kernels, shape((16, 64, 64, 64)))
    for plan in (step.plan(step.problem.unchanged), step.plan()):
        said = plan.predicted.temporary_bytes
        assert step.compiled_bytes(plan) == pytest.approx(said, rel=0.1)


@pytest.mark.slow
@pytest.mark.cuda
@needs_cuda_plugin
def test_convolutions_with_holes_take_no_more_than_was_predicted() -> None:
    def loss(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
        for number, kernel in enumerate(kernels):
            y = convolved(x, kernel, dilation=2 ** (number % 4))
            x = x + jax.nn.relu(y - jnp.mean(y, (0, 1, 2)))
        return jnp.mean(x * x)

    shape = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
    step = InStep(loss, [shape((3, 3, 128, 128))] * 8, shape((32, 64, 64, 128)))
    plan = step.plan()
    said = plan.predicted.temporary_bytes
    assert 0.85 * said < step.compiled_bytes(plan) <= said


def seconds_of_taps(padding, dilation=4, device="h200", taps=2):
    """What a convolution along one axis takes, as a share of one with a single tap."""
    x = jax.ShapeDtypeStruct((8, 4096, 512), "float32")

    def of(taps, padding):
        def loss(kernel, x):
            dimensions = "NWC", "WIO", "NWC"
            found = lax.conv_general_dilated(
                x, kernel, (1,), padding, rhs_dilation=(dilation,), dimension_numbers=dimensions
            )
            return jnp.sum(jnp.sin(found))

        kernel = jax.ShapeDtypeStruct((taps, 512, 512), "float32")
        _, _, graph = graph_of(loss, kernel, x, device=device)
        return graph.seconds[names(graph).index("conv_general_dilated")]

    return of(taps, padding) / of(1, "VALID")


def test_holes_of_a_kernel_take_time_if_the_operand_is_padded_unevenly() -> None:
    # Five taps, three of them zeros; rows that only see padding are not counted.
    assert seconds_of_taps([(4, 0)]) == pytest.approx(5, rel=0.01)
    assert seconds_of_taps([(2, 2)]) == pytest.approx(2, rel=0.01)
    assert seconds_of_taps([(4, 0)], device="cpu") == pytest.approx(2, rel=0.01)


def test_convolutions_are_slower_than_products_of_the_same_size() -> None:
    x = jax.ShapeDtypeStruct((2, 64, 64, 256), "float32")

    def as_product(w, x):
        return jnp.sum(jnp.sin(x @ w))

    def as_convolution(w, x):
        return jnp.sum(jnp.sin(convolved(x, w[None, None])))

    weight = jax.ShapeDtypeStruct((256, 256), "float32")
    _, _, product = graph_of(as_product, weight, x)
    _, _, graph = graph_of(as_convolution, weight, x)
    seconds = graph.seconds[names(graph).index("conv_general_dilated")]
    assert seconds == pytest.approx(2 * product.seconds[names(product).index("dot_general")])
