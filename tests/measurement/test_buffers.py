"""Memory over time, from texts in each form that compilers write, and from real compilers."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from remat_opt.device import Platform
from remat_opt.errors import CompileError
from remat_opt.measurement import compilation, dump
from remat_opt.measurement.buffers import CompiledMemory, attributed, parse_memory, split
from remat_opt.program import tracing
from remat_opt.schedule import Stage
from remat_opt.scopes import Origin, origin
from remat_opt.training import training_step
from remat_opt.transform import rewriting
from tests.devices import needs_cuda_plugin, needs_libtpu

TPU = [pytest.mark.tpu, pytest.mark.slow, pytest.mark.versions, needs_libtpu]
CUDA = [pytest.mark.cuda, needs_cuda_plugin]

#: With a loop, as JAX 0.12 writes it for CPU and NVIDIA: pages, and no get-tuple-element.
PROGRAM = """\
HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%fused (p: f32[8]) -> (f32[8], f32[8]) {
  %p = f32[8]{0} parameter(0)
  %sine = f32[8]{0} sine(%p), metadata={op_name="jit(f)/jvp(remat_region0)/remat_eq1/sin"}
  %cosine = f32[8]{0} cosine(%p), metadata={op_name="jit(f)/jvp(remat_region0)/remat_eq2/cos"}
  ROOT %pair = (f32[8]{0}, f32[8]{0}) tuple(%sine, %cosine)
}

%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[], f32[8]{0}) parameter(0)
  %inner = f32[8]{0} negate(%s#1), metadata={op_name="jvp(remat_region1)/remat_eq3/neg"}
  %count = s32[] copy(%s#0)
  ROOT %next = (s32[], f32[8]{0}) tuple(%count, %inner)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0), metadata={op_name="x"}
  %both = (f32[8]{0}, f32[8]{0}) fusion(%x), kind=kLoop, calls=%fused
  %start = s32[] constant(0)
  %copy = f32[8]{0} copy(%both#0)
  %state = (s32[], f32[8]{0}) tuple(%start, %copy)
  %loop = (s32[], f32[8]) while(%state), body=%body, metadata={op_name="remat_region1/remat_eq3"}
  %twice = f32[8]{0} add(%both#1, %both#1), metadata={op_name="transpose(remat_region0)/remat_eq2"}
  ROOT %end = f32[8]{0} add(%loop#1, %twice), metadata={op_name="jit(f)/add"}
}
"""
LIVE_RANGES = """\
HloLiveRange (max 13):
  InstructionSequence:
    0:x
    1:both
    2:start
    3:get-tuple-element.1
    4:copy
    5:state
    6:s
    7:inner
    8:count
    9:next
    10:loop
    11:twice
    12:end
  BufferLiveRange:
    x{}:0-13
    both{}:1-3
    both{0}:1-4
    both{1}:1-11
    copy{}:4-6
    s{1}:6-7
    inner{}:7-10
    loop{1}:10-12
    twice{}:11-12
    end{}:12-13
  Live ranges at 4 (peak):
    x{}: 32 bytes (cumulative: 32 bytes)
"""
ASSIGNMENT = """\
BufferAssignment:
allocation 0: size 32, page 0, parameter 0, shape |f32[8]| at ShapeIndex {}:
 value: <1 x @0> (size=32,offset=0): f32[8]{0}
allocation 1: size 32, page 0, output shape is |f32[8]|, maybe-live-out:
 value: <9 twice @0> (size=32,offset=0): f32[8]{0}
 value: <10 end @0> (size=32,offset=0): f32[8]{0}
allocation 2: size 4, page 0, thread-local:
 value: <2 lhs @0> (size=4,offset=0): f32[]
allocation 3: size 112, page 0, preallocated-temp:
 value: <3 both{} @0> (size=16,offset=96): (f32[8]{0}, f32[8]{0})
 value: <4 both{0} @0> (size=32,offset=0): f32[8]{0}
 value: <5 both{1} @0> (size=32,offset=32): f32[8]{0}
 value: <6 copy @0> (size=32,offset=64): f32[8]{0}
 value: <7 s{1} (phi) @0> (size=32,offset=64): f32[8]{0}
 value: <8 inner @0> (size=32,offset=64): f32[8]{0}
 value: <11 loop{1} (phi) @0> (size=32,offset=64): f32[8]{0}
"""


def older(text: str) -> str:
    """As JAX 0.10 writes it: no pages, and get-tuple-element."""
    return (
        text.replace(", page 0", "")
        .replace(
            "  %copy = f32[8]{0} copy(%both#0)",
            "  %get-tuple-element.1 = f32[8]{0} get-tuple-element(%both), index=0\n"
            "  %copy = f32[8]{0} copy(%get-tuple-element.1)",
        )
        .replace("#0", "")
        .replace("#1", "")
    )


def tpu(text: str) -> str:
    """As XLA for TPU writes it: with tiles, and with memories of other colors."""
    return text.replace("f32[8]{0}", "f32[8]{0:T(128)}").replace(
        "allocation 3: ",
        "allocation 7: size 4096, color 1, page 0, preallocated-temp:\n"
        " value: <20 start @1> (size=4096,offset=0): s32[]{:T(128)S(1)}\n"
        "allocation 3: ",
    )


def parsed(change: Any = str, **texts: str) -> CompiledMemory:
    given = {"program": PROGRAM, "live_ranges": LIVE_RANGES, "assignment": ASSIGNMENT} | texts
    return parse_memory(**{name: change(text) for name, text in given.items()}, device="cpu")


@pytest.mark.parametrize("form", [str, older, tpu])
def test_every_form_is_read_alike(form: Any) -> None:
    memory = parsed(form)
    steps = [one for one in memory.instructions if one.opcode != "get-tuple-element"]
    assert [step.name for step in steps] == [
        "x", "both", "start", "copy", "state", "loop", "twice", "end",
    ]  # fmt: skip
    assert memory.heap_bytes == 112
    # The pair and its table; then a copy while the first is read; last the loop's result.
    assert memory.peak_live_bytes == 96
    assert memory.instructions[memory.peak_step].name == "copy"
    timeline = [
        live
        for one, live in zip(memory.instructions, memory.timeline.tolist(), strict=True)
        if one.opcode != "get-tuple-element"
    ]
    assert timeline == [0, 80, 80, 96, 64, 64, 64, 32]
    assert memory.timeline.dtype == np.int64


@pytest.mark.parametrize("form", [str, older, tpu])
def test_what_lives_at_a_step_adds_up(form: Any) -> None:
    memory = parsed(form)
    for step, live in enumerate(memory.timeline):
        assert sum(buffer.size_bytes for buffer in memory.alive(step)) == live
        assert sum(split(memory, step).values()) == live


def test_buffers_have_their_makers() -> None:
    found = {(one.buffer.instruction, one.buffer.index): one for one in attributed(parsed())}
    assert found["both", (0,)].origin == Origin(equation=1, region=(0,), phase="forward")
    assert found["both", (1,)].origin == Origin(equation=2, region=(0,), phase="forward")
    # A copy has no name: what it is a copy of does.
    assert found["copy", ()].origin.region == (0,)
    assert found["inner", ()].origin.equation == 3
    assert found["loop", (1,)].origin == Origin(equation=3, region=(1,), phase="forward")
    assert found["twice", ()].origin.phase == "backward"
    assert found["end", ()].origin == Origin(equation=None, region=(), phase="other")


def test_kinds_of_values_and_of_places() -> None:
    kinds = {
        one.instruction: (one.kind, one.allocation, one.allocation_number)
        for one in parsed().buffers
    }
    assert kinds["x"] == ("argument", "argument", 0)
    assert kinds["twice"] == ("temporary", "result", 1)
    assert kinds["end"] == ("result", "result", 1)
    assert kinds["copy"] == ("temporary", "temporary", 3)
    assert "lhs" not in kinds


def test_what_lives_in_a_loop_is_of_its_step() -> None:
    memory = parsed()
    step = [one.name for one in memory.instructions].index("loop")
    lives = {one.instruction: (one.first_step, one.last_step, one.counts) for one in memory.buffers}
    assert lives["inner"][:2] == (step, step)
    # They share a place, so at most one of them counts.
    assert sum(lives[name][2] for name in ("s", "inner")) <= 1


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"live_ranges": ""}, "no order of instructions"),
        ({"live_ranges": LIVE_RANGES.replace("0:x", "x")}, "order of instructions has the line"),
        ({"live_ranges": LIVE_RANGES.replace(":1-11", ":?")}, "lives have the line"),
        ({"live_ranges": LIVE_RANGES.replace("    copy{}:4-6\n", "")}, "when 'copy' lives"),
        ({"live_ranges": LIVE_RANGES.replace("11:twice", "11:other")}, "lacks instructions"),
        ({"assignment": ""}, "no allocations"),
        ({"assignment": ASSIGNMENT.replace("(size=32,", "(bytes=32,")}, "allocations have the"),
        ({"assignment": ASSIGNMENT.replace("3: size", "3: of")}, "allocations have the line"),
        ({"program": PROGRAM.replace("%inner =", "%outer =")}, "'inner' is of no instruction"),
    ],
)
def test_what_cannot_be_read_is_said(texts: dict[str, str], message: str) -> None:
    with pytest.raises(CompileError, match=message) as caught:
        parsed(**texts)
    assert caught.value.device == "cpu"
    assert "please report it" in str(caught.value)


def test_a_part_is_counted_with_the_whole_alone() -> None:
    """Slices are written where they are concatenated; there they count once."""
    lives = LIVE_RANGES.replace("copy{}:4-6", "copy{}:3-9")
    assignment = ASSIGNMENT.replace("copy @0> (size=32,offset=64)", "copy @0> (size=48,offset=64)")
    memory = parsed(live_ranges=lives, assignment=assignment)
    assert memory.peak_live_bytes == 112
    assert memory.timeline.max() <= memory.heap_bytes


def test_names() -> None:
    again = (
        "jit(f)/transpose(jvp(jvp(remat_region2_1)))/checkpoint/rematted_computation/remat_eq9/a"
    )
    assert origin(again) == Origin(equation=9, region=(2, 1), phase="recomputed")
    nested = "jit(f)/jvp(remat_region1)/remat_eq4/net/remat_region0/remat_eq2/sin"
    assert origin(nested) == Origin(equation=4, region=(1,), phase="forward")
    assert origin("jit(f)/jvp(seq4)/sin") == Origin(equation=None, region=(), phase="forward")
    assert origin("") == Origin(equation=None, region=(), phase="other")


# Equation 2 i is a product and 2 i + 1 its tanh. Each region keeps its first product.
STAGES = (
    *(
        Stage(roots=(4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3), kept=(4 * i,), checkpointed=True)
        for i in range(3)
    ),
    Stage(roots=(12, 13, 14), kept=(), checkpointed=False),
)
WEIGHTS = [jax.ShapeDtypeStruct((512, 512), "float32")] * 7


def chain(weights: Any, x: jax.Array) -> jax.Array:
    for w in weights:
        with jax.named_scope("layer"):
            x = jnp.tanh(x @ w)
    return jnp.sum(x)


def planned(platform: Platform, rows: int) -> tuple[Any, Any]:
    """The chain with its plan, and an argument; too large for a TPU's vector memory."""
    x = jax.ShapeDtypeStruct((rows, 512), "float32")
    program = tracing.trace(chain, WEIGHTS, x)
    run = rewriting.rewrite(program, STAGES, platform)

    def loss(weights: Any, x: Any) -> Any:
        return run(program.constant_values, [*weights, x])[0]

    return loss, x


@pytest.mark.parametrize(
    ("device", "platform", "rows"),
    [
        ("cpu", "cpu", 4096),
        pytest.param("h200", "cuda", 4096, marks=CUDA),
        pytest.param("v5e", "tpu", 65536, marks=TPU),
    ],
)
def test_compiled(device: str, platform: Platform, rows: int) -> None:
    loss, x = planned(platform, rows)
    found = compilation.measure(
        jax.value_and_grad(loss), WEIGHTS, x, device=device, with_buffers=True
    )
    memory = found.memory
    assert memory is not None, found.notes
    if platform == "tpu" and jax.__version_info__ < (0, 11):
        # It does not report its heap, but figures from which it can be computed.
        assert memory.heap_bytes == pytest.approx(found.temporary_bytes, rel=0.002)
    else:
        assert memory.heap_bytes == found.temporary_bytes
    assert 0.85 * memory.heap_bytes <= memory.timeline.max() <= memory.heap_bytes
    assert memory.timeline[memory.peak_step] == memory.peak_live_bytes == memory.timeline.max()
    assert memory.source == "dump"
    for step in range(0, len(memory.instructions), 5):
        alive = memory.alive(step)
        assert sum(buffer.size_bytes for buffer in alive) == memory.timeline[step]

    attributions = attributed(memory)
    turn = min(one.buffer.first_step for one in attributions if one.origin.phase == "backward")
    waiting = {
        (one.origin.equation, one.origin.region)
        for one in attributions
        if one.origin.phase == "forward"
        and one.buffer.size_bytes == rows * 512 * 4
        and one.buffer.first_step < turn < one.buffer.last_step
    }
    # Not the first region's input, an argument; that of each other one is the last tanh before it.
    kept, inputs = {(0, (0,)), (4, (1,)), (8, (2,))}, {(3, (0,)), (7, (1,)), (11, (2,))}
    assert kept <= waiting
    assert waiting - kept <= inputs | {(13, (3,)), (12, (3,))}
    assert any("layer" in buffer.op_name for buffer in memory.buffers)
    origins = split(memory, memory.peak_step)
    owned = sum(size for one, size in origins.items() if one.equation is not None)
    assert owned >= 0.9 * memory.peak_live_bytes


def test_a_measurement_has_it_only_if_asked(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    bare = compilation.measure(lambda x: jnp.sin(x @ x) @ x, x, device="cpu")
    full = compilation.measure(lambda x: jnp.sin(x @ x) @ x, x, device="cpu", with_buffers=True)
    assert bare.memory is None
    assert full.memory is not None
    assert full.to_dict().keys() == bare.to_dict().keys()
    assert "memory" not in bare.to_dict()
    assert compilation.Measurement.from_dict(full.to_dict()) == full
    assert dataclasses.replace(full, memory=None) == full
    assert list(tmp_path.iterdir()) == []


def test_a_text_that_cannot_be_read_is_a_note(monkeypatch: Any) -> None:
    monkeypatch.setattr(dump, "_ASSIGNMENT", "-assignment-of-another-name.txt")
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    found = compilation.measure(lambda x: x @ x, x, device="cpu", with_buffers=True)
    assert found.memory is None
    assert "for 0 programs of this name rather than one" in found.notes[-1]
    with pytest.raises(CompileError, match="wrote it for 0 programs"):
        compilation.compiled_memory(lambda x: x @ x, x, device="cpu")


def test_what_jax_has_cached_is_compiled_all_the_same(tmp_path: Path) -> None:
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    x = jax.ShapeDtypeStruct((64, 64), "float32")

    def fn(x: jax.Array) -> jax.Array:
        return jnp.cos(x @ x) @ x

    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compilation_cache.reset_cache()
        compilation.measure(fn, x, device="cpu")
        cached = sorted(tmp_path.iterdir())
        assert cached
        memory = compilation.compiled_memory(fn, x, device="cpu")
        assert memory.heap_bytes > 0
        assert jax.config.values["jax_enable_compilation_cache"]
        # Nothing was written meanwhile, and the cache is on again.
        assert len(sorted(tmp_path.iterdir())) == len(cached)
        compilation.measure(lambda x: fn(x) + 1, x, device="cpu")
        assert len(sorted(tmp_path.iterdir())) > len(cached)
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
        compilation_cache.reset_cache()


@needs_libtpu
@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the compiler does not tell its heap")
def test_temporaries_that_lie_in_donated_arguments_are_not_counted() -> None:
    """As in a training step: more is alive than the heap holds."""
    shapes = (8, 512, 1024), (8, 1024, 512), (2048, 512)
    *weights, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)

    def loss(weights: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> tuple[Any, None]:
            return x + jax.nn.gelu(x @ w[0]) @ w[1], None

        return jnp.mean(lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2)

    optimizer = optax.adam(1e-3)
    state = jax.eval_shape(optimizer.init, weights)
    found = compilation.measure(
        training_step(loss, optimizer),
        weights,
        state,
        x,
        device="v5e",
        donate_argnums=(0, 1),
        with_buffers=True,
    )
    assert found.memory is not None, found.notes
    assert 0 < found.temporary_bytes == found.memory.heap_bytes
