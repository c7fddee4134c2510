"""From a function and its arguments to a Program.

The function is traced by ``jax.make_jaxpr`` with its positional and keyword arguments flattened;
nested ``jit`` calls are inlined, everything else that holds an inner program (scan, cond, while,
custom derivative rules, an inner checkpoint) stays one equation. On request, inner checkpoints are
dissolved: their bodies take their place, also in loops and branches. Equations that nothing reads
and that have no side effects are left out, and so are products that repeat another, with what
repeats what follows it.

What the function closes over is a constant, unless it is itself being traced. Then it is an
argument like others, and is differentiated if JAX is differentiating it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from remat_opt import _jax_internals as internals
from remat_opt.errors import RematError, TraceError
from remat_opt.misuse import takes
from remat_opt.operation import GUESSED_TURNS, PRODUCTS, ArrayType, Body, Operation
from remat_opt.program.placement import placement_of
from remat_opt.program.record import Atom, Constant, Equation, Program
from remat_opt.program.static_leaves import any_held, hold, release


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """How to read the arguments of a function; the terms are those of ``jax.grad``.

    Attributes:
      argnums: the positional argument(s) to differentiate, if the trace does not show it; None for
        the first that is not static.
      has_aux: whether the function returns a pair (differentiated, auxiliary).
      static_argnums: positional arguments that are Python values, not arrays.
      static_argnames: keyword arguments that are Python values, not arrays.
      dissolved: whether the function's own checkpoints are ignored.
      communicates_again: whether collectives may run again.
    """

    argnums: tuple[int, ...] | None = None
    has_aux: bool = False
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    dissolved: bool = False
    communicates_again: bool = False

    def with_instance(self) -> Signature:
        """The same for a method that receives its instance as first argument."""

        def moved(numbers: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(number + 1 if number >= 0 else number for number in numbers)

        argnums = None if self.argnums is None else moved(self.argnums)
        static_argnums = moved(self.static_argnums)
        return dataclasses.replace(self, argnums=argnums, static_argnums=static_argnums)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call with its static arguments bound: only arrays are left.

    Attributes:
      name: the called function's name.
      fn: takes the remaining positional and keyword arguments. Its result may have leaves that are
        not arrays.
      args: remaining positional arguments.
      kwargs: remaining keyword arguments.
      argnums: positions, among ``args``, of the differentiated ones.
      argnames: names, among ``kwargs``, of the differentiated ones that were passed by name.
      positions: positions of ``args`` in the call.
      labels: the names of ``args``, or their positions if unknown.
      static: the bound arguments, by position or name.
      dissolved: see ``Signature``, as for what follows.
      communicates_again: likewise.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    argnums: tuple[int, ...]
    argnames: tuple[str, ...]
    positions: tuple[int, ...]
    labels: tuple[int | str, ...]
    static: tuple[tuple[int | str, Any], ...]
    dissolved: bool = False
    communicates_again: bool = False


#: The key of a ``Fixed`` part in the path of a leaf.
_FIXED = jax.tree_util.GetAttrKey("fixed by remat_opt")


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    """A part of an argument that has no derivative though the argument is differentiated."""

    tree: Any

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], None]:
        """For JAX."""
        return ((_FIXED, self.tree),), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> Fixed:
        """For JAX."""
        return cls(*children)


def bind_static(
    fn: Callable[..., Any], signature: Signature, args: Sequence[Any], kwargs: dict[str, Any]
) -> Call:
    """Binds the static arguments of a call, and finds the differentiated ones among the rest.

    Raises:
      TraceError: an argument number is out of range, or names a static argument, or a name is not
        that of an argument.
    """
    fn = internals.without_compiler_options(fn)
    count = len(args)
    parameters = _parameters(fn)

    def found(number: int, what: str) -> int | str | None:
        """The argument's position, its name if passed by name, or None if left out."""
        if number < count or number >= len(parameters):
            return position_of(number, count, what)
        return parameters[number] if parameters[number] in kwargs else None

    static = {found(number, "static_argnums") for number in signature.static_argnums}
    for name in signature.static_argnames:
        if name in kwargs:
            static.add(name)
        elif name in parameters:
            static.add(parameters.index(name))
        elif parameters and not takes(inspect.signature(fn), name):
            raise TraceError(
                f"static_argnames names {name!r}, but the function's arguments are "
                f"{', '.join(parameters)}. Correct the name, or take it out."
            )
    argnums = signature.argnums
    if argnums is None:
        numbers = range(max(count, len(parameters)))
        argnums = tuple(n for n in numbers if found(n, "argnums") not in static)[:1]
    differentiated = [found(number, "argnums") for number in argnums]
    for where in differentiated:
        if where is not None and where in static:
            raise TraceError(
                f"Argument {where!r} is differentiated (argnums) and also static (static_argnums "
                "or static_argnames); a static argument has no derivative. Take it out of one "
                "of them."
            )
    dynamic = [number for number in range(count) if number not in static]
    names = {name: value for name, value in kwargs.items() if name in static}

    given = {number: args[number] for number in range(count) if number in static}
    own = (
        tuple(args[number] for number in dynamic),
        {name: value for name, value in kwargs.items() if name not in names},
    )
    held = hold(own)
    holds = any_held(held)

    def bound(*dynamic_args: Any, **dynamic_kwargs: Any) -> Any:
        if holds:
            dynamic_args, dynamic_kwargs = release((dynamic_args, dynamic_kwargs))
        placed = {**given, **dict(zip(dynamic, dynamic_args, strict=True))}
        return fn(*(placed[number] for number in range(count)), **dynamic_kwargs, **names)

    return Call(
        name=getattr(fn, "__name__", type(fn).__name__),
        fn=bound if static or holds else fn,
        args=held[0],
        kwargs=held[1],
        argnums=tuple(dynamic.index(where) for where in differentiated if isinstance(where, int)),
        argnames=tuple(where for where in differentiated if isinstance(where, str)),
        positions=tuple(dynamic),
        labels=tuple((*parameters, *range(len(parameters), count))[n] for n in dynamic),
        static=(*given.items(), *sorted(names.items())),
        dissolved=signature.dissolved,
        communicates_again=signature.communicates_again,
    )


def position_of(number: int, count: int, what: str) -> int:
    """The position of a positional argument by its number, which may count from the end.

    Raises:
      TraceError: there is no such argument.
    """
    position = number + count if number < 0 else number
    if not 0 <= position < count:
        raise TraceError(
            f"{what} names argument {number}, but the function was called with {count} positional "
            "argument(s). Pass that argument by position, or change the number."
        )
    return position


def _parameters(fn: Callable[..., Any]) -> list[str]:
    """The names of the parameters that may be passed by position; none if unknown."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in by_position]


def trace(
    fn: Callable[..., Any],
    *args: Any,
    signature: Signature | None = None,
    **kwargs: Any,
) -> Program:
    """Traces ``fn`` at the shapes of its arguments.

    Args:
      fn: any function that ``jax.make_jaxpr`` can trace.
      *args: arrays, numpy arrays, Python numbers, tracers or ``jax.ShapeDtypeStruct``,
        in any pytree.
      signature: which arguments are differentiated, static, and whether there is an
        auxiliary output.
      **kwargs: keyword arguments, likewise.

    Returns:
      The function as flat data.

    Raises:
      TraceError: the function needs the value of a number that is not declared static, or the
        result does not fit the signature.
    """
    signature = signature or Signature()
    return trace_call(bind_static(fn, signature, args, kwargs), has_aux=signature.has_aux)


def trace_call(call: Call, *, has_aux: bool, as_declared: bool = False) -> Program:
    """Traces a call whose static arguments are bound; see ``trace``.

    Args:
      call: the call. If a derivative is being taken, what JAX differentiates counts as
        differentiated, whatever ``argnums`` says. If none is visible and ``argnums`` says nothing,
        everything that is closed over and being traced does.
      has_aux: whether the function returns a pair (differentiated, auxiliary).
      as_declared: go by ``argnums`` in any case.
    """
    leaves, tree = jax.tree.flatten((call.args, call.kwargs))

    # Python numbers among the results are returned as they are, not as arrays.
    numbers: dict[int, Any] = {}

    def flat_fn(*flat: Any) -> Any:
        positional, keywords = jax.tree.unflatten(tree, flat)
        result = hold(call.fn(*positional, **keywords))
        numbers.update(
            (position, leaf)
            for position, leaf in enumerate(jax.tree.leaves(result))
            if type(leaf) in (bool, int, float, complex)
        )
        return result

    try:
        closed, shapes = internals.make_jaxpr(flat_fn, *leaves)
    except Exception as error:
        if isinstance(error, RematError):
            raise
        _check_values(call, error)
        raise
    output_leaves, output_tree = jax.tree.flatten(shapes)
    loss_outputs = len(output_leaves)
    if has_aux:
        if not (isinstance(shapes, tuple) and len(shapes) == 2):
            raise TraceError(
                "has_aux=True says that the function returns a pair (loss, auxiliary), but it "
                f"returns {_kind(shapes)}. Return a pair, or leave has_aux out."
            )
        loss_outputs = len(jax.tree.leaves(shapes[0]))
    program = _Flattener(
        opens=True, dissolved=call.dissolved, communicates_again=call.communicates_again
    ).program(
        closed,
        numbers,
        loss_outputs,
        input_tree=tree,
        output_tree=output_tree,
        name=call.name,
        argument_labels=call.labels,
        given=leaves,
    )
    program = dataclasses.replace(
        program, closed_over_names=_closure_names(call.fn, program.closed_over)
    )
    values = [*leaves, *program.closed_over]
    seen = [place for place, value in enumerate(values) if internals.is_differentiated(value)]
    if seen and not as_declared:
        return _differentiating(program, seen)
    declared = [
        place
        for place, (path, _) in enumerate(
            jax.tree_util.tree_flatten_with_path((call.args, call.kwargs))[0]
        )
        if _is_differentiated(path, call)
    ]
    found = _differentiating(program, declared)
    return (
        found
        if found.differentiated
        else _differentiating(program, range(len(leaves), len(values)))
    )


def _closure_names(fn: Callable[..., Any], values: Sequence[Any]) -> tuple[str, ...]:
    """The variables and paths by which a function's code reads the values it closes over.

    Returns:
      One for each value; "" if neither the function nor one that it calls has a variable for it.
    """
    found = {id(value): "" for value in values}
    pending, seen = [fn] if values else [], set()
    while pending:
        one = pending.pop(0)
        if isinstance(one, functools.partial):
            pending.append(one.func)
        one = inspect.unwrap(getattr(one, "__func__", one))
        closure = getattr(one, "__closure__", None) or ()
        if id(one) in seen or not closure:
            continue
        seen.add(id(one))
        for name, cell in zip(one.__code__.co_freevars, closure, strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # A variable without a value yet.
                continue
            if callable(value):
                pending.append(value)
            for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
                if found.get(id(leaf)) == "":
                    found[id(leaf)] = name + jax.tree_util.keystr(path)
    return tuple(found[id(value)] for value in values)


def _differentiating(program: Program, places: Iterable[int]) -> Program:
    """The program with derivatives taken for these arguments."""
    arguments = (program.arguments[place] for place in places)
    return dataclasses.replace(
        program, differentiated=tuple(v for v in arguments if is_inexact(program.types[v]))
    )


def _kind(shapes: Any) -> str:
    if isinstance(shapes, tuple):
        return f"a tuple of {len(shapes)}"
    return f"a {type(shapes).__name__}"


def _is_differentiated(path: tuple[Any, ...], call: Call) -> bool:
    if _FIXED in path:
        return False
    if path[0].idx == 0:
        return path[1].idx in call.argnums
    return path[1].key in call.argnames


def _check_values(call: Call, error: Exception) -> None:
    """Raises TraceError if tracing failed because a Python number argument was traced."""
    given: dict[Any, Any] = {**dict(enumerate(call.args)), **call.kwargs}
    numbers = {key: value for key, value in given.items() if type(value) in (bool, int, float)}

    def is_traced(own: Iterable[int | str]) -> bool:
        """Whether the call can be traced with these arguments as Python numbers."""
        others = [key for key in given if key not in own]

        def fn(values: Sequence[Any]) -> Any:
            known = {**given, **dict(zip(others, values, strict=True))}
            args = [known.pop(number) for number in range(len(call.args))]
            return call.fn(*args, **known)

        try:
            internals.make_jaxpr(fn, [given[key] for key in others])
        except Exception:
            return False
        return True

    if not numbers or not is_traced(numbers):
        return
    needed = [key for key in numbers if not is_traced(set(numbers) - {key})] or list(numbers)
    labels = [call.labels[key] if isinstance(key, int) else key for key in needed]
    told = ", ".join(
        f"{label!r} ({given[key]!r})" for key, label in zip(needed, labels, strict=True)
    )
    names = [label for label in labels if isinstance(label, str)]
    places = [label for label in labels if isinstance(label, int)]
    options = [
        f"{option}={found[0]!r}" if len(found) == 1 else f"{option}={tuple(found)!r}"
        for option, found in (("static_argnames", names), ("static_argnums", places))
        if found
    ]
    raise TraceError(
        f"{call.name!r} needs the value of {told}, but arguments are traced, as under jax.jit. "
        f"Decorate it with {', '.join(options)}."
    ) from error


def array_type(aval: Any) -> ArrayType:
    """The shape and dtype of a JAX abstract value; tokens and the like take no bytes."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return ArrayType(shape=(0,), dtype="uint8")
    return ArrayType(shape=tuple(int(size) for size in aval.shape), dtype=str(aval.dtype))


def _turns(equation: Any) -> int | None:
    """How often the inside of an equation runs; None for a ``while`` that does not say."""
    if equation.primitive.name == "scan":
        return internals.scan_length(equation.params)
    return internals.while_turns(equation) if equation.primitive.name == "while" else 1


def operation(equation: Any) -> Operation:
    """One jaxpr equation as plain data, inner programs included."""
    params = equation.params
    turns = _turns(equation)
    bodies = tuple(
        Body(
            operations=tuple(operation(inner) for inner in internals.parts(jaxpr)[3]),
            repeats=GUESSED_TURNS if turns is None else turns,
            guessed=turns is None,
        )
        for _, jaxpr in internals.inner_jaxprs(params)
    )
    return Operation(
        primitive=equation.primitive.name,
        inputs=tuple(array_type(variable.aval) for variable in equation.invars),
        outputs=tuple(array_type(variable.aval) for variable in equation.outvars),
        params=params,
        bodies=bodies,
    )


def inner_program(closed: Any, positions: Sequence[int], name: str) -> Program:
    """An inner program of an equation as a separate program, all outputs differentiated.

    Args:
      closed: its jaxpr.
      positions: positions of the differentiated inputs.
      name: what to call it.
    """
    program = _Flattener(opens=False).program(
        closed,
        {},
        len(internals.parts(closed)[4]),
        input_tree=None,
        output_tree=None,
        name=name,
    )
    return _differentiating(program, positions)


class _Flattener:
    """Numbers the values of a jaxpr and lists its equations, nested calls inlined.

    Args:
      opens: whether constants that are being traced become arguments.
      dissolved: whether inner checkpoints are dissolved.
      communicates_again: whether collectives are no side effects.
    """

    def __init__(
        self, *, opens: bool, dissolved: bool = False, communicates_again: bool = False
    ) -> None:
        self.opens = opens
        self.dissolved = dissolved
        self.communicates_again = communicates_again
        self.closed_over: dict[int, Any] = {}
        self.closed_over_kinds: list[Any] = []
        self.types: list[ArrayType] = []
        self.constants: list[int] = []
        self.constant_values: list[Any] = []
        self.constant_kinds: list[Any] = []
        self.equations: list[Equation] = []

    def program(
        self,
        closed: Any,
        numbers: Mapping[int, Any],
        loss_outputs: int,
        *,
        input_tree: Any,
        output_tree: Any,
        name: str,
        argument_labels: tuple[int | str, ...] = (),
        given: Sequence[Any] | None = None,
    ) -> Program:
        constant_variables, constants, inputs, equations, outputs = internals.parts(closed)
        scope: dict[Any, Atom] = {}
        for variable, value in zip(constant_variables, constants, strict=True):
            scope[variable] = self._constant(variable, value)
        for variable in inputs:
            scope[variable] = self._value(variable)
        arguments = tuple(atom for v in inputs if isinstance(atom := scope[v], int))
        self._inline(equations, scope, prefix=None)
        distinct, first = _distinct(self.equations)
        results = tuple(
            _renamed(self._result(variable, scope), first)
            if number not in numbers
            else Constant(value=numbers[number], text=f"{numbers[number]}:{variable.aval}")
            for number, variable in enumerate(outputs)
        )
        kinds = (
            *self.constant_kinds,
            *(variable.aval for variable in inputs),
            *self.closed_over_kinds,
        )
        closed_over = tuple(self.closed_over.values())
        return Program(
            types=tuple(self.types),
            constants=tuple(self.constants),
            constant_values=tuple(self.constant_values),
            arguments=(*arguments, *self.closed_over),
            closed_over=closed_over,
            differentiated=(),
            equations=_live(distinct, results),
            outputs=results,
            loss_outputs=loss_outputs,
            input_tree=input_tree,
            output_tree=output_tree,
            name=name,
            argument_labels=argument_labels,
            kinds=kinds,
            communicates_again=self.communicates_again,
            placement=(
                None
                if given is None
                else placement_of([*self.constant_values, *given, *closed_over], kinds, equations)
            ),
        )

    def _value(self, variable: Any) -> int:
        self.types.append(array_type(variable.aval))
        return len(self.types) - 1

    def _constant(self, variable: Any, value: Any) -> int:
        number = self._value(variable)
        if self.opens and isinstance(value, jax.core.Tracer):
            self.closed_over[number] = value
            self.closed_over_kinds.append(variable.aval)
        else:
            self.constants.append(number)
            self.constant_values.append(value)
            self.constant_kinds.append(variable.aval)
        return number

    def _read(self, variable: Any, scope: dict[Any, Atom]) -> Atom:
        if isinstance(variable, internals.Literal):
            return Constant(value=variable.val, text=f"{variable.val}:{variable.aval}")
        return scope[variable]

    def _result(self, variable: Any, scope: dict[Any, Atom]) -> Atom:
        atom = self._read(variable, scope)
        if isinstance(atom, Constant):
            return dataclasses.replace(atom, value=internals.array_of(atom.value, variable.aval))
        return atom

    def _inline(
        self,
        equations: Iterable[Any],
        scope: dict[Any, Atom],
        prefix: Any,
        calls: tuple[Any, ...] = (),
    ) -> None:
        for equation in equations:
            inputs = tuple(self._read(variable, scope) for variable in equation.invars)
            body = internals.inlinable_body(equation)
            if self.dissolved:
                checkpoint = internals.checkpoint_of(equation)
                body = body if checkpoint is None else checkpoint.body
                equation = internals.without_checkpoints(equation)
            if self.opens:  # inner programs are those of equations that were seen to here
                equation = internals.noting_collectives(equation, again=self.communicates_again)
            stack = internals.name_stack_of(equation, prefix)
            if body is None:
                outputs = tuple(self._value(variable) for variable in equation.outvars)
                scope.update(zip(equation.outvars, outputs, strict=True))
                self.equations.append(self._equation(equation, inputs, outputs, stack, calls))
                continue
            variables, constants, body_inputs, body_equations, body_outputs = internals.parts(body)
            inner: dict[Any, Atom] = dict(zip(body_inputs, inputs, strict=True))
            for variable, value in zip(variables, constants, strict=True):
                inner[variable] = self._constant(variable, value)
            self._inline(body_equations, inner, stack, (equation, *calls))
            for variable, result in zip(equation.outvars, body_outputs, strict=True):
                scope[variable] = self._read(result, inner)

    def _equation(
        self,
        equation: Any,
        inputs: tuple[Atom, ...],
        outputs: tuple[int, ...],
        stack: Any,
        calls: tuple[Any, ...],
    ) -> Equation:
        return Equation(
            operation=operation(equation),
            inputs=inputs,
            outputs=outputs,
            effects=internals.has_effects(equation),
            once=internals.has_effects(equation)
            or internals.calls_back(equation)
            or internals.maps_communicate(equation),
            parameters=internals.describe_parameters(equation.params),
            module=str(stack),
            jax_equation=equation,
            name_stack=stack,
            calls=calls,
        )


def is_inexact(kind: ArrayType) -> bool:
    """Whether arrays of a type have derivatives."""
    return kind.dtype.startswith(("float", "bfloat", "complex"))


def _distinct(equations: Sequence[Equation]) -> tuple[list[Equation], dict[int, int]]:
    """The equations without products that repeat an earlier one, and what follows those.

    A model that is evaluated twice, as for its value and for its derivative, is computed once, as
    compilers do where no checkpoint lies between. What repeats no product stays: to compute a mask
    in each layer costs nothing, to hold one throughout does.

    Returns:
      The equations, and for each result that is left out the one to read in its place.
    """
    seen: dict[Any, Equation] = {}
    # The first of all values that are equal, and those of them that are read in others' place.
    canonical: dict[int, int] = {}
    first: dict[int, int] = {}
    found = []
    for equation in equations:
        read = tuple(_renamed(atom, first) for atom in equation.inputs)
        repeats_more = read != equation.inputs
        if repeats_more:
            equation = dataclasses.replace(equation, inputs=read)
        barrier = equation.operation.primitive == "optimization_barrier"
        if not (equation.once or equation.operation.bodies or barrier):
            key = (
                equation.operation.primitive,
                equation.parameters,
                equation.operation.outputs,
                tuple(
                    canonical.get(atom, atom) if isinstance(atom, int) else atom.text
                    for atom in read
                ),
            )
            earlier = seen.setdefault(key, equation)
            if earlier is not equation and internals.same_parameters(
                earlier.jax_equation, equation.jax_equation
            ):
                for mine, other in zip(equation.outputs, earlier.outputs, strict=True):
                    canonical[mine] = canonical.get(other, other)
                if repeats_more or equation.operation.primitive in PRODUCTS:
                    first.update(zip(equation.outputs, earlier.outputs, strict=True))
                    continue
        found.append(equation)
    return found, first


def _renamed(atom: Atom, names: Mapping[int, int]) -> Atom:
    return names.get(atom, atom) if isinstance(atom, int) else atom


def _live(equations: Sequence[Equation], results: Sequence[Atom]) -> tuple[Equation, ...]:
    """The equations that an output depends on, and those with effects."""
    wanted = {atom for atom in results if isinstance(atom, int)}
    kept = []
    for equation in reversed(equations):
        if equation.effects or any(output in wanted for output in equation.outputs):
            wanted.update(equation.value_inputs)
            kept.append(equation)
    return tuple(reversed(kept))
