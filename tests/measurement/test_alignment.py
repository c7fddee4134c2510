"""Memory as compiled against the replay: from hand-made records, and from real compilers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat_opt import planning, verification
from remat_opt.device import get_device
from remat_opt.measurement.alignment import align
from remat_opt.measurement.buffers import Buffer, CompiledMemory, Step
from remat_opt.plan import Objective
from remat_opt.program import tracing
from remat_opt.program.tracing import Signature
from remat_opt.simulator import Moment
from tests.devices import needs_cuda_plugin

FORWARD = "jvp(remat_region{})/remat_eq{}/x"
AGAIN = "transpose(jvp(remat_region{}))/checkpoint/rematted_computation/remat_eq{}/x"
BACKWARD = "transpose(jvp(remat_region{}))/checkpoint/remat_eq{}/x"
#: The equations of the vertices.
ROOTS = (1, 4, 6)


def moment(phase: str, region: int, vertex: int, depth: int = 0) -> Moment:
    return Moment(phase=phase, region=region, vertex=vertex, depth=depth, live_bytes=0)


#: Vertices 0 and 1 under a checkpoint, 2 under none.
MOMENTS = (
    moment("forward", 0, 0),
    moment("forward", 0, 1),
    moment("forward", 1, 2),
    moment("backward", 1, 2),
    moment("recompute", 0, 0),
    moment("recompute", 0, 1),
    moment("backward", 0, 1),
    moment("backward", 0, 0),
)


def memory(*steps: tuple[str, int], buffers: tuple[Buffer, ...] = ()) -> CompiledMemory:
    """A compiled program with these names and bytes alive."""
    timeline = np.array([live for _, live in steps], np.int64)
    return CompiledMemory(
        heap_bytes=int(timeline.max()),
        peak_live_bytes=int(timeline.max()),
        peak_step=int(timeline.argmax()),
        timeline=timeline,
        instructions=tuple(
            Step(name=f"i{n}", opcode="fusion", op_name=name) for n, (name, _) in enumerate(steps)
        ),
        buffers=buffers,
        source="",
    )


WHOLE = (
    (FORWARD.format(0, 1), 10),
    (FORWARD.format(0, 4), 20),
    (FORWARD.format(1, 6), 30),
    (BACKWARD.format(1, 6), 40),
    (AGAIN.format(0, 1), 50),
    (AGAIN.format(0, 4), 60),
    (BACKWARD.format(0, 4), 70),
    (BACKWARD.format(0, 1), 80),
)


def test_each_moment_has_its_own() -> None:
    found = align(memory(*WHOLE), MOMENTS, ROOTS)
    assert found.compiled_bytes == (10, 20, 30, 40, 50, 60, 70, 80)
    assert all(found.named)


def test_what_is_computed_on_the_way_counts_to_the_vertex() -> None:
    steps = [*WHOLE, (BACKWARD.format(0, 0), 90)]
    steps.insert(1, (FORWARD.format(0, 3), 25))
    found = align(memory(*steps), MOMENTS, ROOTS)
    assert found.compiled_bytes[:2] == (10, 25)
    assert found.compiled_bytes[-1] == 90


def test_what_has_no_name_counts_to_what_runs_before() -> None:
    steps = list(WHOLE)
    steps[5:5] = [("jit(step)/sub", 55), ("", 45)]
    found = align(memory(("", 99), *steps), MOMENTS, ROOTS)
    assert found.compiled_bytes == (10, 20, 30, 40, 55, 60, 70, 80)


def test_a_kernel_does_the_work_of_the_moments_before_it() -> None:
    without = [step for step in WHOLE if step[0] not in (AGAIN.format(0, 1), BACKWARD.format(0, 1))]
    found = align(memory(*without), MOMENTS, ROOTS)
    assert found.compiled_bytes == (10, 20, 30, 40, 60, 60, 70, 70)
    assert found.named == (True, True, True, True, False, True, True, False)


def test_what_is_far_from_its_turn_is_left_out() -> None:
    found = align(memory((BACKWARD.format(0, 1), 1000), *WHOLE), MOMENTS, ROOTS)
    assert found.compiled_bytes == (10, 20, 30, 40, 50, 60, 70, 80)


def test_a_region_without_names_is_unknown() -> None:
    forward = [step for step in WHOLE if "transpose" not in step[0]]
    found = align(memory(*forward), MOMENTS, ROOTS)
    assert found.compiled_bytes == (10, 20, 30, None, None, None, None, None)
    nothing = align(memory(("", 5)), MOMENTS, ROOTS)
    assert set(nothing.compiled_bytes) == {None}


def test_checkpoints_inside_run_again_deeper() -> None:
    inner = (
        "transpose(jvp(remat_region0))/checkpoint/remat_region0_1/checkpoint/"
        "rematted_computation/remat_eq4/x"
    )
    outer = (
        "transpose(jvp(remat_region0))/checkpoint/rematted_computation/remat_region0_1/remat_eq4/x"
    )
    story = (moment("recompute", 0, 1), moment("recompute", 0, 1, 1), moment("backward", 0, 1))
    found = align(memory((outer, 10), (inner, 20), (BACKWARD.format(0, 4), 30)), story, ROOTS)
    assert found.compiled_bytes == (10, 20, 30)


def test_what_waits_for_the_backward_pass() -> None:
    def buffer(name: str, size: int, first: int, last: int, **other: Any) -> Buffer:
        fields: dict[str, Any] = {
            "instruction": "b", "index": (), "offset_bytes": 0, "allocation_number": 0,
            "allocation": "temporary", "kind": "temporary", "counts": True, "op_name": name,
        } | other  # fmt: skip
        return Buffer(size_bytes=size, first_step=first, last_step=last, made_by=(name,), **fields)

    buffers = (
        buffer(FORWARD.format(0, 4), 100, 1, 6),
        buffer(FORWARD.format(0, 3), 11, 1, 6, allocation="argument"),
        buffer(FORWARD.format(0, 1), 100, 0, 2),
        buffer(BACKWARD.format(1, 6), 100, 3, 6),
        buffer("", 100, 0, 7),
        buffer(FORWARD.format(1, 6), 100, 2, 7, kind="result"),
        buffer(FORWARD.format(1, 6), 100, 2, 7, counts=False),
    )
    found = align(memory(*WHOLE, buffers=buffers), MOMENTS, ROOTS)
    assert found.kept_bytes == {1: 111}


def layers(weights: Any, x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w) + x
    return jnp.sum(x**2)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("h200", marks=[pytest.mark.cuda, needs_cuda_plugin])]
)
def test_most_moments_of_a_real_program_are_told(device: str) -> None:
    shapes = [jax.ShapeDtypeStruct((256, 256), "float32")] * 8
    x = jax.ShapeDtypeStruct((2048, 256), "float32")
    program = tracing.trace(layers, shapes, x, signature=Signature())
    problem = planning.problem(program, get_device(device))
    chosen = planning.solve(problem, Objective(budget_bytes=problem.unchanged.peak_bytes // 2))
    plan = planning.describe(problem, program, chosen, Objective())
    measured = verification.measure_plan(
        plan, program, [*shapes, x], problem.device, with_buffers=True
    )
    assert measured.memory is not None
    story = planning.replay(problem, chosen.schedule)
    found = align(measured.memory, story, problem.model.roots)
    known = [size for size in found.compiled_bytes if size is not None]
    assert len(known) >= 0.9 * len(story)
    assert sum(found.named) >= 0.3 * len(story)
    assert max(known) == measured.memory.peak_live_bytes
    assert sum(found.kept_bytes.values()) == pytest.approx(plan.predicted.kept_bytes, rel=0.2)
