"""One equation -> lines of Python, with the programs inside it as functions.

This writes what ``transform.equations`` runs: what one equation becomes is repeated here, as text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.lax import GatherScatterMode

from remat_opt import _jax_internals as internals
from remat_opt.compilers.joins import Join
from remat_opt.compilers.rewrites import Rewrites
from remat_opt.errors import RematError
from remat_opt.export import kept, support
from remat_opt.export.calls import Call, bound, call
from remat_opt.export.functions import Functions
from remat_opt.export.layout import INDENT, assigned, listed, wrapped
from remat_opt.export.literals import UnprintableError, constant_text, quoted, text
from remat_opt.export.naming import Distinct, rule_name, value_names, word_of
from remat_opt.export.reading import (
    has_usual_type,
    policy_text,
    program_of,
    scan_inputs,
    scan_options,
    where_from,
)
from remat_opt.operation import CHECKPOINTS, PRODUCTS
from remat_opt.program.record import Atom, Equation, Program
from remat_opt.schedule import Inside
from remat_opt.transform.equations import exchanged, has_mode, stands_in
from remat_opt.transform.steps import places_read


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one equation of a region waits for, and what waits for it; see ``transform.turns``.

    Attributes:
      named: whether its outputs carry names.
      before: arguments that pass a barrier with the inputs.
      behind: arguments whose cotangents go on together with those of the outputs; None if these
        go on by themselves.
      after: arguments that pass a barrier with the outputs.
      follows: a value that passes a barrier with the inputs, if any.
      tied: positions of the inputs whose cotangents go on together.
      waited: values that must exist before the inputs go on; None if these do not wait.
      unmerged: the position of the input that is read behind a barrier.
      weight: the position of the input whose gradient comes first.
      join: the concatenation whose pieces are read in its place.
    """

    named: bool = False
    before: frozenset[int] = frozenset()
    behind: frozenset[int] | None = None
    after: frozenset[int] = frozenset()
    follows: int | None = None
    tied: tuple[int, ...] = ()
    waited: tuple[int, ...] | None = None
    unmerged: int | None = None
    weight: int | None = None
    join: Join | None = None

    @property
    def passed_on(self) -> frozenset[int]:
        """The values that are something else behind the equation: they passed a barrier."""
        follows = () if self.follows is None else (self.follows,)
        return self.before.union(self.behind or (), self.after, follows)


_FREE = Turn()
#: Longer calls are written as functions where a function is needed.
_LONGEST = 70


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The body of a function being written.

    Attributes:
      program: the program whose equations are written.
      names: the names of its values.
      distinct: the names in use.
      ways: what to write differently.
      summed: the values that derivatives are taken of, or with respect to.
      loops: the opened ones.
      label: the prefix of the names that values are kept by.
      takes_at: whether the function's argument ``at`` comes before that prefix.
      apart: whether scalar constants must be separate arrays.
      module: the part of an equation's origin that need not be mentioned.
    """

    program: Program
    names: dict[int, str]
    distinct: Distinct
    ways: Rewrites | None = None
    summed: frozenset[int] = frozenset()
    loops: Mapping[int, Inside] = dataclasses.field(default_factory=dict)
    label: str = ""
    takes_at: bool = False
    apart: bool = False
    module: str = ""

    def kept_as(self, value: int) -> str:
        """The text of the name under which a value is kept."""
        written = quoted(f"{self.label}{self.names[value]}")
        return f"at + {written}" if self.takes_at else written


class Equations:
    """Writes equations; the helpers they need go to ``functions``.

    Args:
      functions: those of the file.
      opened: writes an opened loop: takes a scope, the position of its equation and its inputs to
        the call that runs it.
    """

    def __init__(
        self, functions: Functions, opened: Callable[[Scope, int, Sequence[str]], Call]
    ) -> None:
        self.functions = functions
        self.helper = functions.helper
        self._opened = opened

    def lines(self, scope: Scope, index: int, turn: Turn = _FREE) -> list[str]:
        """The lines of an equation in its turn, as ``rewriting._runner`` runs it.

        Raises:
          RematError: it cannot be written as code.
        """
        equation, names = scope.program.equations[index], scope.names
        places = places_read(scope.program, index, turn.join)
        read = [(scope.program.equations[one], place) for one, place in places]
        inputs = [self.atom(scope, one, place) for one, place in read]
        atoms = [one.inputs[place] for one, place in read]
        lines: list[str] = []

        def behind(
            places: Sequence[int],
            fn: Callable[..., Any],
            *others: str,
            rebound: frozenset[int] = frozenset(),
            dropped: bool = False,
        ) -> None:
            """A function passes on the inputs and others; all but these inputs get new names."""
            given = (*(inputs[place] for place in places), *others)
            for place in places:
                if atoms[place] not in rebound:
                    inputs[place] = scope.distinct.name("tied", numbered=True)
            results = [inputs[place] for place in places]
            results += ["_"] * len(others) if dropped else others
            lines.extend(assigned(results, Call(self.helper(fn), given)))

        everywhere = range(len(inputs))
        try:
            if turn.before:
                behind(everywhere, support.behind_barrier, rebound=turn.before)
            elif turn.tied and turn.weight is None:
                behind(turn.tied, support.cotangents_together)
            if turn.waited is not None:
                waited = (names[value] for value in turn.waited)
                behind(everywhere, support.stored, *waited, dropped=True)
            if turn.follows is not None:
                behind(everywhere, support.stored, names[turn.follows])
            if turn.unmerged is not None:
                behind((turn.unmerged,), support.stored)
            lines += self._one(scope, index, inputs, turn)
        except UnprintableError as error:
            raise RematError(
                f"{where_from(equation) or 'The program'}: {equation.operation.primitive} cannot "
                f"be written as code, since it holds {error}."
            ) from None
        if turn.behind is not None:
            together = (*equation.outputs, *turn.behind)
            lines += self._together(scope, together, support.cotangents_together)
        if turn.after:
            together = (*equation.outputs, *sorted(turn.after))
            lines += self._together(scope, together, support.behind_barrier)
        return lines

    def _together(self, scope: Scope, values: Iterable[int], fn: Callable[..., Any]) -> list[str]:
        """The line in which a function passes on all of these values."""
        read = [scope.names[value] for value in values]
        return assigned(read, Call(self.helper(fn), tuple(read)))

    def atom(self, scope: Scope, equation: Equation, place: int) -> str:
        """The input of an equation at a position."""
        atom = equation.inputs[place]
        if isinstance(atom, int):
            return scope.names[atom]
        kind = equation.jax_equation.invars[place].aval
        written = constant_text(atom.value, str(kind.dtype), weak=kind.weak_type)
        if scope.apart and not kind.shape:
            return f"lax.optimization_barrier(jnp.asarray({written}, {quoted(str(kind.dtype))}))"
        return written

    # --- programs that run as they are ----------------------------------------------------

    def flat(self, program: Program, wanted: str, *, apart: bool = False) -> str:
        """Writes a program without a plan as a function of flat arguments; returns its name.

        Args:
          program: the program.
          wanted: the wanted name.
          apart: whether its scalar constants must be separate arrays.
        """
        distinct = self.functions.distinct()
        arguments = [distinct.name("x", numbered=True) for _ in program.arguments]
        names = value_names(program, arguments, distinct)
        lines = self.constants(program, names)
        lines += self.unplanned(program, names, distinct, apart=apart)
        lines.append(f"return {listed([self.output(names, one) for one in program.outputs])}")
        return self.functions.defined_once(wanted, arguments, lines)

    def unplanned(
        self,
        program: Program,
        names: dict[int, str],
        distinct: Distinct,
        *,
        apart: bool = False,
        without: int | None = None,
    ) -> list[str]:
        """The lines of a program's equations in order, except one."""
        scope = Scope(program=program, names=names, distinct=distinct, apart=apart)
        return [
            line
            for index in range(len(program.equations))
            if index != without
            for line in self.lines(scope, index)
        ]

    def constants(self, program: Program, names: Mapping[int, str]) -> list[str]:
        """Lines that set the arrays that an inner program holds."""
        return [
            f"{names[value]} = {constant_text(array, program.types[value].dtype, weak=False)}"
            for value, array in zip(program.constants, program.constant_values, strict=True)
        ]

    def output(self, names: Mapping[int, str], atom: Atom) -> str:
        """The results of a program."""
        if isinstance(atom, int):
            return names[atom]
        kind = jax.typeof(atom.value)
        written = constant_text(atom.value, str(kind.dtype), weak=kind.weak_type)
        return (
            written
            if type(atom.value) in (bool, int, float, complex)
            else f"jnp.asarray({written})"
        )

    # --- one equation ------------------------------------------------------------------------

    def _one(self, scope: Scope, index: int, inputs: list[str], turn: Turn) -> list[str]:
        """The lines of one equation, as ``transform.equations.run_one`` runs it."""
        equation = scope.program.equations[index]
        ways, named, weight, join = scope.ways, turn.named, turn.weight, turn.join
        results = [scope.names[value] for value in equation.outputs]
        waiting = ways is not None and index in ways.waiting
        symmetric = ways is not None and index in ways.symmetric
        own_rule = waiting or symmetric or weight is not None or join is not None
        if named and stands_in(equation, scope.summed, own_rule=own_rule):
            return kept.lines(self, scope, index, inputs, results)
        if index in scope.loops:
            lines = assigned(results, self._opened(scope, index, inputs))
        elif ways is not None and index in ways.apart:
            lines = assigned(results, Call(self._custom_jvp(equation, apart=True), tuple(inputs)))
        elif ways is not None and index in ways.picking:
            operands = self._lambda(equation, ("operand", "indices"))
            given = (operands, *inputs, str(has_mode(equation, GatherScatterMode.CLIP)))
            lines = assigned(results, Call(self.helper(support.picked), given), one=True)
        elif ways is not None and index in ways.summing:
            modes = GatherScatterMode.CLIP, GatherScatterMode.FILL_OR_DROP
            shape = text(equation.operation.outputs[0].shape)
            given = (*inputs, shape, *(str(has_mode(equation, mode)) for mode in modes))
            lines = assigned(results, Call(self.helper(support.summed), given), one=True)
        elif ways is not None and index in ways.flat:
            lines = assigned(results, self._of_flat(equation, inputs), one=True)
        elif symmetric:
            given = (self._lambda(equation, ("a", "b")), text(exchanged(equation)), *inputs)
            lines = assigned(results, Call(self.helper(support.symmetric), given), one=True)
        elif waiting:
            operands = self._lambda(equation, tuple(f"x{n}" for n in range(len(inputs))))
            lines = assigned(results, Call(f"jax.checkpoint({operands})", tuple(inputs)), one=True)
        elif join is not None:
            axis = scope.program.equations[join.equation].operation.params["dimension"]
            operands = self._lambda(equation, ("a", "b"))
            pieces, other = join.parted(inputs)
            given = (operands, *map(text, (join.place, axis, join.axis)), other, *pieces)
            lines = assigned(results, Call(self.helper(support.in_pieces), given), one=True)
        elif weight is not None:
            operands = self._lambda(equation, ("a", "b"))
            lines = assigned(
                results,
                Call(self.helper(support.weight_first), (operands, str(weight), *inputs)),
                one=True,
            )
        else:
            lines = self.plain(equation, inputs, results)
        if ways is not None and index in ways.whole and not named:
            lines += assigned(results, Call(self.helper(support.stored), tuple(results)))
        if named:
            for value, result in zip(equation.outputs, results, strict=True):
                lines += assigned([result], self.named(scope, value, result), one=True)
        return lines

    def _of_flat(self, equation: Equation, inputs: Sequence[str]) -> Call:
        """A gather that reads its operand as a flat array."""
        params = equation.jax_equation.params
        numbers = params["dimension_numbers"]
        positions = zip(
            numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
        )
        options = ("unique_indices", "mode", "fill_value")
        given = (
            text(equation.operation.outputs[0].shape),
            text(numbers.start_index_map[0]),
            text(tuple(positions)),
            *(f"{name}={text(params[name])}" for name in options),
        )
        return Call(self.helper(support.of_flat), (*inputs, *given))

    def named(self, scope: Scope, value: int, written: str) -> Call:
        """The line that names a value, to keep it."""
        name = scope.kept_as(value)
        if scope.program.types[value].dtype.startswith("complex"):
            return Call(self.helper(support.named_parts), (written, name))
        return Call("checkpoint_name", (written, name))

    def plain(self, equation: Equation, inputs: Sequence[str], results: Sequence[str]) -> list[str]:
        """The lines of an unchanged equation."""
        expression, several = self.call(equation, inputs)
        return assigned(results, expression, one=not several)

    def _lambda(self, equation: Equation, arguments: Sequence[str]) -> str:
        given = [
            name if isinstance(atom, int) else constant_text(atom.value, kind.dtype, weak=False)
            for name, atom, kind in zip(
                arguments, equation.inputs, equation.operation.inputs, strict=True
            )
        ]
        return self.as_function(equation, self.call(equation, given)[0], arguments)

    def as_function(
        self, equation: Equation, made: Call, arguments: Sequence[str], behind: str = ""
    ) -> str:
        """An equation as a function of these arguments."""
        if len(str(made)) <= _LONGEST:
            return f"lambda {', '.join(arguments)}: {made}{behind}"
        lines = wrapped(made, "return ", behind)
        return self.functions.defined_once(f"{word_of(equation)}_of", arguments, lines)

    def call(self, equation: Equation, inputs: Sequence[str]) -> tuple[Call, bool]:
        """The call that makes an equation, and whether it returns several results."""
        primitive, params = equation.operation.primitive, equation.jax_equation.params
        several = bool(equation.jax_equation.primitive.multiple_results)
        if primitive == "custom_jvp_call":
            return Call(self._custom_jvp(equation), tuple(inputs)), True
        if primitive == "scan":
            return self._scan(equation, inputs), True
        if primitive in ("while", "cond"):
            write = self._while if primitive == "while" else self._cond
            return write(params, inputs), True
        if primitive in CHECKPOINTS:
            return self._checkpoint(params, inputs), True
        if primitive == "name":
            return Call("checkpoint_name", (*inputs, quoted(params["name"]))), False
        if equation.effects or (
            equation.operation.bodies and not primitive.startswith(("scatter", "reduce_"))
        ):
            raise UnprintableError("Python code of its own, or has side effects")
        if primitive in PRODUCTS and has_usual_type(equation):
            params = {**params, "preferred_element_type": None}
        if primitive == "reshape" and params["dimensions"] is None:
            # ``lax.reshape`` to the same shape makes no equation.
            same = equation.operation.inputs[0].shape == tuple(params["new_sizes"])
            return (bound if same else call)(primitive, params, inputs), several
        return call(primitive, params, inputs), several

    def _inner(self, closed: Any, wanted: str) -> str:
        return self.flat(program_of(closed), wanted)

    def _scan(self, equation: Equation, inputs: Sequence[str]) -> Call:
        scan = internals.scan_of(equation.jax_equation)
        body = self._inner(scan.body, "iteration")
        options = scan_options(scan)
        return Call(
            self.helper(support.flat_scan),
            (body, *scan_inputs(scan, inputs), f"length={scan.length}", *options),
        )

    def _while(self, params: Mapping[str, Any], inputs: Sequence[str]) -> Call:
        of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
        condition = self._inner(params["cond_jaxpr"], "condition")
        body = self._inner(params["body_jaxpr"], "turn")
        held = inputs[:of_condition]
        read = inputs[of_condition : of_condition + of_body]
        return Call(
            "lax.while_loop",
            (
                f"lambda carry: {condition}({', '.join([*held, '*carry'])})[0]",
                f"lambda carry: {body}({', '.join([*read, '*carry'])})",
                listed(inputs[of_condition + of_body :]),
            ),
        )

    def _cond(self, params: Mapping[str, Any], inputs: Sequence[str]) -> Call:
        branches = [self._inner(branch, "branch") for branch in params["branches"]]
        return Call("lax.switch", (inputs[0], f"[{', '.join(branches)}]", *inputs[1:]))

    def _checkpoint(self, params: Mapping[str, Any], inputs: Sequence[str]) -> Call:
        body = self._inner(params["jaxpr"], "block")
        policy = params["policy"]
        options = [] if policy is None else [f"policy={policy_text(policy)}"]
        if params["prevent_cse"] is not True:
            options.append(f"prevent_cse={params['prevent_cse']!r}")
        return Call(f"jax.checkpoint({', '.join([body, *options])})", tuple(inputs))

    def _custom_jvp(self, equation: Equation, *, apart: bool = False) -> str:
        """Writes a function with its derivative; returns its name."""
        params = equation.jax_equation.params
        wanted = rule_name(params)
        kinds = equation.operation.inputs
        moving = [
            place
            for place, kind in enumerate(kinds)
            if kind.dtype.startswith(("float", "bfloat", "complex"))
        ]

        def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            def along(*moved: Any) -> list[Any]:
                given = list(primals)
                for place, value in zip(moving, moved, strict=True):
                    given[place] = value
                return internals.bind(equation.jax_equation, equation.name_stack, given)

            return jax.jvp(along, [primals[place] for place in moving], list(tangents))[1]

        def write(function: str) -> None:
            body = self.flat(program_of(params["call_jaxpr"]), f"{wanted}_of", apart=apart)
            inside = internals.parts(params["call_jaxpr"])[3]
            if not apart and len(inside) == 1 and internals.inlinable_body(inside[0]) is not None:
                # As in the program: compilers may arrange what they inline differently.
                body = f"jax.jit({body})"
            shapes = [jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in kinds]
            closed, _ = internals.make_jaxpr(
                derivative, shapes, [shapes[place] for place in moving]
            )
            rule = self.flat(program_of(closed), f"{wanted}_moved")
            lines = [
                f"{function} = jax.custom_jvp({body})",
                "",
                "",
                f"@{function}.defjvp",
                f"def {self.functions.name(f'{wanted}_rule')}(primals, tangents):",
                f"{INDENT}moving = {listed([f'tangents[{place}]' for place in moving])}",
                f"{INDENT}return {function}(*primals), {rule}(*primals, *moving)",
            ]
            self.functions.texts.append("\n".join(lines))

        key = f"custom_jvp {apart} {equation.parameters} {kinds}"
        return self.functions.once(key, wanted, write)
