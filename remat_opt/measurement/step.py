"""The training step: a function in which a decorated loss is differentiated, compiled as a whole.

A gradient alone is not training. Its results lend their buffers to temporaries until they are
written; in a step that updates donated parameters there are no such buffers, and gradients are
temporaries themselves. So the worth of a plan, or of a policy of ``jax.checkpoint``, is measured in
the step in which it will run: the unchanged step, with something else run in place of the loss.

A call of a decorated function inside ``with running(how):`` runs what ``how`` makes of it. JAX
keeps the traces of functions under ``jax.jit``, and would reuse an earlier one. So each ``running``
is a separate JAX context (``jax.make_user_context``), which is part of JAX's cache keys.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from remat_opt import _jax_internals as internals
from remat_opt import policies
from remat_opt.compilers.compiler import Compiler
from remat_opt.device import CompilerOption, Device
from remat_opt.errors import RematError
from remat_opt.measurement import compilation
from remat_opt.measurement.compilation import Measurement
from remat_opt.operation import ArrayType, Operation
from remat_opt.program import flop_count, propagation, tracing
from remat_opt.program.record import Program, Spec
from remat_opt.program.roles import Role, argument_roles
from remat_opt.program.static_leaves import release
from remat_opt.program.tracing import Signature
from remat_opt.timeline import Resident

#: Takes the loss to a function with the same results, to run in its place.
How = Callable[[Callable[..., Any]], Callable[..., Any]]

#: Takes (which loss, the function in it, its signature) to what runs in its place; None for the
#: decorated function itself.
_Instead = Callable[[object, Callable[..., Any], Signature], Callable[..., Any] | None]

#: The number of the innermost ``running``; a number, since JAX's caches hold on to it.
_innermost = jax.make_user_context(default_value=None)
_instead: dict[int, _Instead] = {}
_numbers = itertools.count()

_MARK = "remat_opt_call_"


def as_it_is(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a loss unchanged."""
    return fn


@contextlib.contextmanager
def _replacing(instead: _Instead) -> Iterator[None]:
    number = next(_numbers)
    _instead[number] = instead
    try:
        with _innermost(number):
            yield
    finally:
        del _instead[number]


@contextlib.contextmanager
def running(how: How, loss: object = None) -> Iterator[None]:
    """While this is open, calls of a decorated loss run something else.

    Inside the replacement, decorated functions are themselves again.

    Args:
      how: gives what to run in place of the undecorated function, such as the function
        itself, or ``lambda fn: jax.checkpoint(fn)``.
      loss: which loss, as in ``LossCall.loss``; every one if None.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from remat_opt import optimal_remat
      >>> from remat_opt.measurement.step import running
      >>> loss = optimal_remat(jnp.sum, device="cpu")
      >>> with running(lambda fn: lambda x: fn(x) + 1):
      ...     loss(jnp.ones(3)).item()
      4.0
    """

    def instead(
        called: object, fn: Callable[..., Any], signature: Signature
    ) -> Callable[..., Any] | None:
        return how(fn) if loss is None or called is loss else None

    with _replacing(instead):
        yield


def instead_of(
    loss: object, fn: Callable[..., Any], signature: Signature
) -> Callable[..., Any] | None:
    """What a call of a decorated function must run instead, or None for itself.

    Args:
      loss: which one it is: the same object for a method, however bound.
      fn: the undecorated function.
      signature: how its arguments are read.
    """
    number = _innermost.value
    # Gone if a trace outlives its context.
    if number is None or number not in _instead:
        return None
    found = _instead[number](loss, fn, signature)
    if found is None:
        return None
    function = found

    def run(*args: Any, **kwargs: Any) -> Any:
        with _innermost(None):
            return function(*args, **kwargs)

    return run


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossCall:
    """A call of a decorated loss, as seen in a step.

    Attributes:
      loss: which one; for ``running``.
      fn: the undecorated function. If it is a method, its instance may have been a tracer.
      bound: the call itself, with shapes for its arrays.
      signature: how its arguments are read.
      program: what the call traces to.
      arguments: its flat arguments, as shapes.
      times: how often the step runs it: more than once in a loop.
    """

    loss: object
    fn: Callable[..., Any]
    bound: tracing.Call
    signature: Signature
    program: Program
    arguments: tuple[Any, ...]
    times: int = 1


class Recorded:
    """The calls of decorated losses that a trace came across.

    Attributes:
      seen: whether there was any, differentiated or not.
    """

    def __init__(self) -> None:
        self._calls: list[LossCall] = []
        self._differentiated: set[int] = set()

    @property
    def seen(self) -> bool:
        """Whether there was any call, differentiated or not."""
        return bool(self._calls)

    def calls(self, traced: Program) -> tuple[LossCall, ...]:
        """Those that were differentiated, in order.

        Args:
          traced: the step's trace, which shows how often each call runs.
        """
        times = _times(one.operation for one in traced.equations)
        places = _places(traced) if self._differentiated else {}
        found = [
            dataclasses.replace(
                call,
                times=max(times[mark] for mark in _marks(number, call)),
                program=_placed(
                    call.program, traced, [places.get(m) for m in _marks(number, call)]
                ),
            )
            for number, call in enumerate(self._calls)
            if number in self._differentiated
        ]
        # A call that only asks for shapes is traced but never runs.
        return tuple(call for call in found if call.times)

    def instead(
        self, loss: object, fn: Callable[..., Any], signature: Signature
    ) -> Callable[..., Any]:
        """The function itself, recorded when it is called."""

        def run(*args: Any, **kwargs: Any) -> Any:
            call = tracing.bind_static(fn, signature, args, kwargs)
            number = len(self._calls)
            leaves, tree = jax.tree.flatten((call.args, call.kwargs))
            program = tracing.trace_call(call, has_aux=signature.has_aux)
            positional, keywords = jax.tree.unflatten(tree, [*map(_shape, leaves)])
            bound = dataclasses.replace(call, args=positional, kwargs=keywords)
            leaves = [*leaves, *program.closed_over]
            self._calls.append(
                LossCall(
                    loss=loss,
                    fn=fn,
                    bound=bound,
                    signature=signature,
                    program=program,
                    arguments=tuple(map(_shape, leaves)),
                )
            )
            marked = self._marked(number, leaves)
            if not program.closed_over:
                positional, keywords = jax.tree.unflatten(tree, marked)
                return call.fn(*positional, **keywords)
            # The function itself would read what it closes over without the marks.
            outputs = policies.as_it_is(program)(program.constant_values, marked)
            return release(jax.tree.unflatten(program.output_tree, outputs))

        return run

    def _marked(self, number: int, leaves: Sequence[Any]) -> list[Any]:
        """Marks the arguments, to show whether they are differentiated and how often the call runs.

        The mark's derivative shows the first. Its name, in the step's program, shows the second,
        and how they are laid out on a mesh.
        """
        places = [p for p, leaf in enumerate(leaves) if _has_derivative(leaf)]

        @jax.custom_jvp
        def mark(*given: Any) -> tuple[Any, ...]:
            names = (_mark(number, place) for place in places)
            return tuple(map(checkpoint_name, given, names))

        @mark.defjvp
        def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
            self._differentiated.add(number)
            return mark(*primals), tangents

        marked = [
            checkpoint_name(leaf, _mark(number, p)) if _is_whole_number(leaf) else leaf
            for p, leaf in enumerate(leaves)
        ]
        if places:
            for place, value in zip(places, mark(*(leaves[p] for p in places)), strict=True):
                marked[place] = value
        return marked


def _mark(number: int, place: int) -> str:
    return f"{_MARK}{number}_{place}"


def _marks(number: int, call: LossCall) -> list[str]:
    return [_mark(number, place) for place in range(len(call.arguments))]


@contextlib.contextmanager
def recording() -> Iterator[Recorded]:
    """While this is open, calls of decorated losses run undecorated and are recorded."""
    found = Recorded()
    with _replacing(found.instead):
        yield found


def _has_derivative(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)


def _is_whole_number(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jax.numpy.issubdtype(leaf.dtype, jax.numpy.integer)


def _places(step: Program) -> dict[str, Spec]:
    """How the marked values of a step are split over its mesh."""
    specs = propagation.specs(step)
    return {
        name: specs.get(value, ())
        for equation in step.equations
        for name, value in zip(_names(equation.operation), equation.outputs, strict=False)
    }


def _names(operation: Operation) -> list[str]:
    """The marks that an equation puts on its outputs, in order.

    If the derivative of a mark is not taken in the step's own trace, the mark is still a call.
    """
    found = [operation] if operation.primitive == "name" else []
    if operation.primitive == "custom_jvp_call":
        found = [one for body in operation.bodies for one in body.operations]
    if any(one.primitive != "name" for one in found):
        return []
    return [one.params["name"] for one in found]


def _placed(program: Program, step: Program, specs: Sequence[Spec | None]) -> Program:
    """The program of a loss, with its arguments laid out as in the step."""
    if step.placement is None:
        return program
    # The layout of what it closes over is unknown.
    constants, closed_over = (None,) * len(program.constants), (None,) * len(program.closed_over)
    placement = dataclasses.replace(
        step.placement, kinds=program.kinds, specs=(*constants, *specs, *closed_over)
    )
    return dataclasses.replace(program, placement=placement)


def _shape(leaf: Any) -> Any:
    if not isinstance(leaf, jax.core.Tracer):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)


def _times(operations: Iterable[Operation]) -> Counter[str]:
    """How often each mark runs."""
    found: Counter[str] = Counter()
    for one in operations:
        if one.primitive == "name":
            found[one.params["name"]] += 1
        for body in one.bodies:
            for name, count in _times(body.operations).items():
                found[name] += count if body.guessed else count * body.repeats
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A function to compile, with a decorated loss inside.

    Attributes:
      fn: the step: it differentiates the loss and does everything else.
      args: its positional arguments: arrays, or ``jax.ShapeDtypeStruct`` in their place.
      kwargs: its keyword arguments.
      static_argnums: as in ``jax.jit``.
      static_argnames: as in ``jax.jit``.
      donate_argnums: as in ``jax.jit``.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()

    @property
    def static_positions(self) -> tuple[int, ...]:
        """The positional arguments that are static, by position or by name."""
        signature = Signature(
            argnums=(), static_argnums=self.static_argnums, static_argnames=self.static_argnames
        )
        static = tracing.bind_static(self.fn, signature, self.args, dict(self.kwargs)).static
        return tuple(where for where, _ in static if isinstance(where, int))

    @property
    def compiler_options(self) -> Mapping[str, CompilerOption]:
        """Those of the ``jax.jit`` around the function, if there is one."""
        return internals.compiler_options_of(self.fn)

    @property
    def dynamic_argnums(self) -> tuple[int, ...]:
        """The positional arguments that are not static."""
        static = self.static_positions
        return tuple(number for number in range(len(self.args)) if number not in static)

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    def measure(
        self, how: How, loss: object, device: Device, *, with_buffers: bool = False
    ) -> Measurement:
        """Compiles the step with something run in place of the loss.

        Args:
          how: what to run, as for ``running``.
          loss: which loss.
          device: the machine to compile for.
          with_buffers: whether to read also what is alive when.

        Raises:
          CompileError: the compiler refuses it, as for lack of memory.
        """
        with running(how, loss):
            return self.compiled(device, with_buffers=with_buffers)

    def compiled(
        self, device: Device, *, with_buffers: bool = False, as_written: bool = False
    ) -> Measurement:
        """Compiles the step as it stands.

        Args:
          device: the machine to compile for.
          with_buffers: whether to read also what is alive when.
          as_written: whether to leave out the compiler's own rematerialisation, if possible.

        Raises:
          CompileError: the compiler refuses it, as for lack of memory.
        """
        return compilation.measure(
            self.fn,
            *self.args,
            device=device,
            static_argnums=self.static_positions,
            static_argnames=self.static_argnames,
            donate_argnums=self.donate_argnums,
            with_buffers=with_buffers,
            as_written=as_written,
            **self.kwargs,
        )

    def flops(self, how: How, loss: object) -> int:
        """FLOPs of the step with something run in place of the loss; nothing is compiled."""
        with running(how, loss):
            return flop_count.forward_flops(
                self.fn,
                *self.args,
                static_argnums=self.static_argnums,
                static_argnames=self.static_argnames,
                **self.kwargs,
            )

    def trace(self) -> tuple[Program, tuple[LossCall, ...]]:
        """The step as a program, and the calls of decorated losses that it differentiates."""
        signature = Signature(
            argnums=(), static_argnums=self.static_argnums, static_argnames=self.static_argnames
        )
        with recording() as found:
            program = tracing.trace(self.fn, *self.args, signature=signature, **self.kwargs)
        return program, found.calls(program)

    def resident(self, program: Program, device: Device) -> Resident:
        """Arguments and outputs, without the outputs that may use donated arguments.

        Args:
          program: the step's program.
          device: the device that holds them.
        """
        program = propagation.per_device(program)
        buffer_bytes = Compiler(device=device).buffer_bytes
        found: Counter[Role | None] = Counter()
        for value in program.constants:
            found["input"] += buffer_bytes(program.types[value])
        for value, role in zip(program.arguments, argument_roles(program), strict=True):
            found[role] += buffer_bytes(program.types[value])
        free: Counter[ArrayType] = Counter(self._donated(program))
        for value in program.output_values:
            kind = program.types[value]
            if free[kind]:
                free[kind] -= 1
            else:
                found[None] += buffer_bytes(kind)
        return Resident(
            parameters=found["parameter"],
            optimizer_state=found["state"],
            inputs=found["input"],
            results=found[None],
        )

    def _donated(self, program: Program) -> list[ArrayType]:
        donated = {number % len(self.args) for number in self.donate_argnums}
        found: list[ArrayType] = []
        place = 0
        for number in self.dynamic_argnums:
            count = len(jax.tree.leaves(self.args[number]))
            if number in donated:
                found += [program.types[v] for v in program.arguments[place : place + count]]
            place += count
        return found


def donated_by(fn: Callable[..., Any], step: Step) -> tuple[int, ...]:
    """The positional arguments that a function under ``jax.jit`` donates; none for others.

    Args:
      fn: a function, under ``jax.jit`` or not.
      step: with its arguments.
    """
    if not isinstance(fn, jax.stages.Wrapped):
        return ()
    with running(as_it_is):
        positional, _ = fn.trace(*step.args, **step.kwargs).args_info
    return tuple(
        number
        for number, argument in zip(step.dynamic_argnums, positional, strict=True)
        if any(leaf.donated for leaf in jax.tree.leaves(argument))
    )


def the_one(calls: Sequence[LossCall]) -> LossCall:
    """The call to plan for: of several calls of one loss, the one that computes most.

    Raises:
      RematError: the calls are of different losses.
    """
    losses = {id(call.loss) for call in calls}
    if len(losses) > 1:
        names = ", ".join(dict.fromkeys(repr(call.program.name) for call in calls))
        raise RematError(
            f"The step differentiates {len(losses)} decorated losses: {names}. Leave the decorator "
            "off all but the one that is asked about."
        )
    return max(calls, key=lambda call: flop_count.program_flops(call.program))


def forward_flops(calls: Sequence[LossCall]) -> int:
    """FLOPs of all forward passes of the losses in a step."""
    return sum(call.times * flop_count.program_flops(call.program) for call in calls)
