"""Programs and the steps of a plan -> functions as Python text.

What is written is what ``transform.rewriting`` runs: a function for each region, and one that calls
them in order. What both need to know of the order of gradients comes from ``transform.turns`` and
``compilers.rewrites``; what one equation becomes is said once more here, as text.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import jax

from remat_opt import _jax_internals as internals
from remat_opt.compilers.compiler import Rules
from remat_opt.compilers.rewrites import rewrites
from remat_opt.device import Platform
from remat_opt.errors import RematError
from remat_opt.export import support
from remat_opt.export.calls import Call, call
from remat_opt.export.layout import (
    INDENT,
    assigned,
    listed,
    policy_decorator,
    returned,
    wrapped,
)
from remat_opt.export.literals import UnprintableError, constant_text, quoted
from remat_opt.export.naming import Distinct, rule_name, value_names
from remat_opt.export.reading import (
    has_usual_type,
    policy_text,
    program_of,
    same_as,
    scan_inputs,
    scan_options,
    scan_reach,
    where_from,
)
from remat_opt.operation import PRODUCTS
from remat_opt.program import bodies
from remat_opt.program.record import Atom, Constant, Equation, Program
from remat_opt.schedule import Choice, Loop, Part, Stage
from remat_opt.transform.equations import stands_in
from remat_opt.transform.steps import Rewriting, Step, steps_of
from remat_opt.transform.turns import multiplied_again, tied_inputs, with_biases
from remat_opt.units import format_bytes

#: Equations whose derivative is the same, run by run, whether their output is a named one or not.
_BILINEAR = PRODUCTS | {"add", "add_any", "mul", "sub"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """One program that is being written.

    Attributes:
      program: the program.
      names: of its values.
      distinct: the names in use in its functions.
      label: begins the names of its functions, and of what it keeps.
      rewriting: how its steps are to be written; None for a program that is run as it is.
      loops: those that are opened.
      apart: whether scalar constants are to be arrays of their own.
    """

    program: Program
    names: Mapping[int, str]
    distinct: Distinct
    label: str
    rewriting: Rewriting | None = None
    loops: Mapping[int, Loop | Choice] = dataclasses.field(default_factory=dict)
    apart: bool = False


class Printer:
    """Writes functions; they are added to ``functions`` in an order in which they can be run."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.functions: list[str] = []
        self.helpers: set[str] = set()
        self._functions = {name for name, _ in inspect.getmembers(support, inspect.isfunction)}
        self._values: set[str] = set()
        self._top = Distinct(self._functions, self._values, self._functions)
        # Functions that are the same are written once.
        self._known: dict[str, str] = {}

    def helper(self, function: Callable[..., Any]) -> str:
        """A function of ``support`` that is needed; its name."""
        self.helpers.add(function.__name__)
        return function.__name__

    def name(self, wanted: str) -> str:
        """A name for a function."""
        return self._top.name(wanted)

    def distinct(self, taken: Iterable[str] = ()) -> Distinct:
        """Gives the names of values in a function; none of them is that of a function."""
        return Distinct(taken, self._functions, self._values)

    # --- a program and its regions ---------------------------------------------------------

    def chain(
        self,
        program: Program,
        arguments: Sequence[str],
        stages: Sequence[Stage],
        loops: Sequence[Loop | Choice],
        named: Set[int],
        label: str,
        *,
        in_branch: bool = False,
    ) -> tuple[list[str], Scope]:
        """Writes the regions of a program; the lines that call them, and its scope."""
        distinct = self.distinct(arguments)
        opened = {loop.root: loop for loop in loops}
        ways = rewrites(
            program,
            Rules(platform=self.platform),
            recomputes=any(stage.checkpointed for stage in stages),
            in_branch=in_branch,
        )
        scope = Scope(
            program=program,
            names=value_names(program, arguments, distinct),
            distinct=distinct,
            label=label,
            rewriting=Rewriting(
                program=program, summed=bodies.varying(program), ways=ways, within=label
            ),
            loops=opened,
        )
        steps = steps_of(program, stages, frozenset(named))
        return self._calls(scope, steps, ()), scope

    def _calls(self, scope: Scope, steps: Sequence[Step], around: tuple[int, ...]) -> list[str]:
        """The lines that run steps, as ``rewriting._run`` runs them."""
        rewriting, names = scope.rewriting, scope.names
        assert rewriting is not None
        summed, arguments = rewriting.summed, set(scope.program.arguments)
        last_reader = {value: number for number, step in enumerate(steps) for value in step.inputs}
        lines = []
        for number, step in enumerate(steps):
            function = self._region(scope, step, (*around, number))
            results = [names[value] for value in step.outputs]
            inputs = tuple(names[value] for value in step.inputs)
            lines += assigned(results, Call(function, inputs), unpack=True)

            def behind(values: Sequence[int]) -> list[str]:
                given = tuple(names[value] for value in values)
                return assigned(given, Call(self.helper(support.behind_barrier), given))

            if rewriting.ways.stored and step.checkpointed:
                for value in step.outputs:
                    if last_reader.get(value, 0) > number:
                        lines += behind([value])
            shared = [v for v in step.inputs if v in summed and last_reader[v] > number]
            weights = [v for v in shared if v in arguments]
            together = [[v] for v in shared if v not in arguments]
            if weights:
                handed_on = [
                    v for v in step.outputs if v in summed and last_reader.get(v, 0) > number
                ]
                together.append([*weights, *handed_on])
            for values in together:
                lines += behind(values)
        return lines

    def _region(self, scope: Scope, step: Step, number: tuple[int, ...]) -> str:
        """Writes the function of a step; its name."""
        names = scope.names
        wanted = "_".join([scope.label, "region", *(str(n + 1) for n in number)]).lstrip("_")
        function = self.name(wanted)
        if step.inside:
            lines = self._calls(scope, step.inside, number)
        else:
            lines = self._equations(scope, step.equations, step)
        kept = [
            (f"{scope.label}{names[value]}", scope.program.types[value].bytes)
            for index in sorted(step.kept)
            for value in scope.program.equations[index].outputs
        ]
        if not step.checkpointed:
            said, decorator = "No checkpoint: all that its derivative reads is kept.", []
        elif kept:
            total = format_bytes(sum(size for _, size in kept))
            said = f"Keeps {total} by name; the rest is computed again in the backward pass."
            decorator = policy_decorator([name for name, _ in kept])
        else:
            said = "Keeps nothing but what it is handed; all is computed again."
            decorator = ["@jax.checkpoint"]
        results = [names[value] for value in step.outputs]
        self._define(
            function, [names[v] for v in step.inputs], said, lines, returned(results), decorator
        )
        return function

    def flat(
        self, program: Program, wanted: str, *, apart: bool = False, known: Mapping[int, int] = {}
    ) -> str:
        """Writes a program without a plan as a function of flat arguments; its name.

        Args:
          program: the program.
          wanted: the name that is wanted.
          apart: whether its scalar constants are to be arrays of their own.
          known: values that are others of the program.
        """
        distinct = self.distinct()
        arguments = [distinct.name("x", numbered=True) for _ in program.arguments]
        names = value_names(program, arguments, distinct)
        for value, other in known.items():
            names[value] = names[other]
        scope = Scope(program=program, names=names, distinct=distinct, label="", apart=apart)
        lines = self._constants(program, names)
        lines += self._equations(scope, range(len(program.equations)), None)
        back = f"return {listed([self._atom_of_output(names, one) for one in program.outputs])}"
        return self._defined_once(wanted, arguments, lines, back)

    def _constants(self, program: Program, names: Mapping[int, str]) -> list[str]:
        """Lines that set the arrays that an inner program holds."""
        return [
            f"{names[value]} = {constant_text(array, program.types[value].dtype, weak=False)}"
            for value, array in zip(program.constants, program.constant_values, strict=True)
        ]

    def _atom_of_output(self, names: Mapping[int, str], atom: Atom) -> str:
        if isinstance(atom, int):
            return names[atom]
        kind = jax.typeof(atom.value)
        written = constant_text(atom.value, str(kind.dtype), weak=kind.weak_type)
        return (
            written
            if type(atom.value) in (bool, int, float, complex)
            else f"jnp.asarray({written})"
        )

    def _defined_once(
        self, wanted: str, arguments: Sequence[str], lines: Sequence[str], back: str
    ) -> str:
        body = "\n".join([*arguments, *lines, back])
        found = self._known.get(body)
        if found is None:
            found = self._known[body] = self.name(wanted)
            self._define(found, arguments, "", lines, back)
        return found

    def _define(
        self,
        function: str,
        arguments: Sequence[str],
        said: str,
        lines: Sequence[str],
        back: str,
        decorator: Sequence[str] = (),
    ) -> None:
        head = [*decorator, *wrapped(Call(f"def {function}", tuple(arguments)), "", ":")]
        body = [f'"""{said}"""'] if said else []
        body += [*lines, back]
        self.functions.append("\n".join([*head, *(f"{INDENT}{line}" for line in body)]))

    # --- equations -------------------------------------------------------------------------

    def _equations(self, scope: Scope, indices: Iterable[int], step: Step | None) -> list[str]:
        """The lines of equations, as ``rewriting._runner`` runs them."""
        rewriting, names, program = scope.rewriting, scope.names, scope.program
        before: Mapping[int, frozenset[int]] = {}
        behind: Mapping[int, frozenset[int]] = {}
        tied: Mapping[int, tuple[int, ...]] = {}
        if step is not None and rewriting is not None:
            before, behind = multiplied_again(rewriting, step)
            behind = with_biases(rewriting, step, behind)
            tied = tied_inputs(rewriting, step)
        lines: list[str] = []
        said = ""
        known = set(step.inputs) if step is not None else set()
        for index in indices:
            equation = program.equations[index]
            where = where_from(equation)
            if step is not None and where and where != said:
                lines.append(f"# {where}")
                said = where
            inputs = [self._atom(scope, equation, place) for place in range(len(equation.inputs))]
            try:
                if index in before:
                    given = tuple(inputs)
                    for place, atom in enumerate(equation.inputs):
                        if atom not in before[index]:
                            inputs[place] = scope.distinct.name("tied", numbered=True)
                    lines += assigned(inputs, Call(self.helper(support.behind_barrier), given))
                elif rewriting and index in tied and index not in rewriting.ways.weight_place:
                    places = tied[index]
                    given = tuple(inputs[place] for place in places)
                    for place in places:
                        inputs[place] = scope.distinct.name("tied", numbered=True)
                    results = [inputs[place] for place in places]
                    lines += assigned(
                        results, Call(self.helper(support.cotangents_together), given)
                    )
                if rewriting and step and not step.checkpointed and index in rewriting.ways.partner:
                    lines += self._with_partner(scope, index, inputs, known)
                weight = None
                if rewriting and index in tied:
                    weight = rewriting.ways.weight_place.get(index)
                named = step is not None and index in step.named
                lines += self._one(scope, index, inputs, named=named, weight=weight)
            except UnprintableError as error:
                raise RematError(
                    f"{where or 'The program'}: {equation.operation.primitive} cannot be written "
                    f"as code, since it holds {error}."
                ) from None
            known.update(equation.outputs)
            if index in behind:
                read = [names[v] for v in (*equation.outputs, *behind[index])]
                lines += assigned(read, Call(self.helper(support.cotangents_together), tuple(read)))
        return lines

    def _with_partner(
        self, scope: Scope, index: int, inputs: list[str], known: Set[int]
    ) -> list[str]:
        """The lines that have a product wait for its partner, as ``turns.with_partner`` does."""
        assert scope.rewriting is not None
        partner = scope.program.equations[scope.rewriting.ways.partner[index]]
        waited_for = set(partner.value_inputs).difference(scope.program.arguments)
        if not waited_for <= known:
            return []
        given = (*inputs, *(scope.names[value] for value in sorted(waited_for)))
        inputs[:] = [scope.distinct.name("tied", numbered=True) for _ in inputs]
        return assigned(
            [*inputs, *["_"] * len(waited_for)], Call(self.helper(support.stored), given)
        )

    def _atom(self, scope: Scope, equation: Equation, place: int) -> str:
        atom = equation.inputs[place]
        if isinstance(atom, int):
            return scope.names[atom]
        kind = equation.jax_equation.invars[place].aval
        written = constant_text(atom.value, str(kind.dtype), weak=kind.weak_type)
        if scope.apart and not kind.shape:
            return f"lax.optimization_barrier(jnp.asarray({written}, {quoted(str(kind.dtype))}))"
        return written

    def _one(
        self, scope: Scope, index: int, inputs: list[str], *, named: bool, weight: int | None
    ) -> list[str]:
        """The lines of one equation, as ``transform.equations.run_one`` runs it."""
        equation = scope.program.equations[index]
        ways = scope.rewriting.ways if scope.rewriting else None
        results = [scope.names[value] for value in equation.outputs]
        waiting = ways is not None and index in ways.waiting
        if named and stands_in(equation, waiting=waiting, weight=weight):
            return self._kept(scope, equation, inputs, results)
        if index in scope.loops:
            lines = self._opened(scope, equation, scope.loops[index], inputs, results)
        elif ways is not None and index in ways.apart:
            lines = assigned(results, Call(self._custom_jvp(equation, apart=True), tuple(inputs)))
        elif ways is not None and index in ways.picking:
            operands = self._lambda(equation, ("operand", "indices"))
            clip = equation.jax_equation.params["mode"] == jax.lax.GatherScatterMode.CLIP
            lines = assigned(
                results, Call(self.helper(support.picked), (operands, *inputs, str(clip))), one=True
            )
        elif waiting:
            operands = self._lambda(equation, tuple(f"x{n}" for n in range(len(inputs))))
            lines = assigned(results, Call(f"jax.checkpoint({operands})", tuple(inputs)), one=True)
        elif weight is not None:
            operands = self._lambda(equation, ("a", "b"))
            self.helpers |= {"tied", "zero_of"}
            lines = assigned(
                results,
                Call(self.helper(support.weight_first), (operands, str(weight), *inputs)),
                one=True,
            )
        else:
            lines = self._plain(equation, inputs, results)
        if ways is not None and index in ways.whole and not named:
            lines += assigned(results, Call(self.helper(support.stored), tuple(results)))
        if named:
            for value, result in zip(equation.outputs, results, strict=True):
                lines += assigned([result], self._named(scope, value, result), one=True)
        return lines

    def _named(self, scope: Scope, value: int, written: str) -> Call:
        name = quoted(f"{scope.label}{scope.names[value]}")
        if scope.program.types[value].dtype.startswith("complex"):
            return Call(self.helper(support.named_parts), (written, name))
        return Call("checkpoint_name", (written, name))

    def _plain(
        self, equation: Equation, inputs: Sequence[str], results: Sequence[str]
    ) -> list[str]:
        expression, several = self._call(equation, inputs)
        return assigned(results, expression, one=not several)

    def _lambda(self, equation: Equation, arguments: Sequence[str]) -> str:
        given = [
            name if isinstance(atom, int) else constant_text(atom.value, kind.dtype, weak=False)
            for name, atom, kind in zip(
                arguments, equation.inputs, equation.operation.inputs, strict=True
            )
        ]
        return f"lambda {', '.join(arguments)}: {self._call(equation, given)[0]}"

    def _call(self, equation: Equation, inputs: Sequence[str]) -> tuple[Call, bool]:
        """The call that makes an equation, and whether it gives several results."""
        primitive, params = equation.operation.primitive, equation.jax_equation.params
        several = bool(equation.jax_equation.primitive.multiple_results)
        if primitive == "custom_jvp_call":
            return Call(self._custom_jvp(equation), tuple(inputs)), True
        if primitive == "scan":
            return self._scan(equation, inputs), True
        if primitive in ("while", "cond"):
            write = self._while if primitive == "while" else self._cond
            return write(params, inputs), True
        if primitive in ("checkpoint", "remat2", "remat"):
            return self._checkpoint(params, inputs), True
        if primitive == "name":
            return Call("checkpoint_name", (*inputs, quoted(params["name"]))), False
        if equation.effects or (
            equation.operation.bodies and not primitive.startswith(("scatter", "reduce_"))
        ):
            raise UnprintableError("Python code of its own, or has side effects")
        if primitive in PRODUCTS and has_usual_type(equation):
            params = {**params, "preferred_element_type": None}
        return call(primitive, params, inputs), several

    # --- equations with programs inside ----------------------------------------------------

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
        """Writes a function with its derivative; its name."""
        params = equation.jax_equation.params
        key = f"custom_jvp {apart} {equation.parameters} {equation.operation.inputs}"
        if key in self._known:
            return self._known[key]
        wanted = rule_name(params)
        program = program_of(params["call_jaxpr"])
        body = self.flat(program, f"{wanted}_of", apart=apart)
        function = self._known[key] = self.name(wanted)
        moving = [
            place
            for place, kind in enumerate(equation.operation.inputs)
            if kind.dtype.startswith(("float", "bfloat", "complex"))
        ]

        def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            def along(*moved: Any) -> list[Any]:
                given = list(primals)
                for place, value in zip(moving, moved, strict=True):
                    given[place] = value
                return internals.bind(equation.jax_equation, equation.name_stack, given)

            return jax.jvp(along, [primals[place] for place in moving], list(tangents))[1]

        kinds = [jax.ShapeDtypeStruct(k.shape, k.dtype) for k in equation.operation.inputs]
        closed, _ = internals.make_jaxpr(derivative, kinds, [kinds[place] for place in moving])
        rule = self.flat(program_of(closed), f"{wanted}_moved")
        lines = [
            f"{function} = jax.custom_jvp({body})",
            "",
            "",
            f"@{function}.defjvp",
            f"def {self.name(f'{wanted}_rule')}(primals, tangents):",
            f"{INDENT}moving = {listed([f'tangents[{place}]' for place in moving])}",
            f"{INDENT}return {function}(*primals), {rule}(*primals, *moving)",
        ]
        self.functions.append("\n".join(lines))
        return function

    def _kept(
        self, scope: Scope, equation: Equation, inputs: Sequence[str], results: Sequence[str]
    ) -> list[str]:
        """An equation whose own derivative, where it may, reads the named output."""
        if len(results) == 1:
            parts = self._derivatives(scope, equation)
            if parts is not None:
                places = [p for p, atom in enumerate(equation.inputs) if isinstance(atom, int)]
                arguments = tuple(f"x{place}" for place in places)
                given = [
                    f"x{place}" if place in places else self._atom(scope, equation, place)
                    for place in range(len(inputs))
                ]
                expression, several = self._call(equation, given)
                run = f"lambda {', '.join(arguments)}: {expression}{'[0]' if several else ''}"
                if expression.arguments == arguments and not several:
                    run = expression.fn
                self.helpers.add("zero_of")
                written = Call(
                    self.helper(support.kept),
                    (
                        quoted(f"{scope.label}{results[0]}"),
                        run,
                        f"[{', '.join(parts)}]",
                        *(inputs[place] for place in places),
                    ),
                )
                return assigned(results, written, one=True)
            expression, several = self._call(equation, inputs)
            (value,) = equation.outputs
            made = f"{expression}{'[0]' if several else ''}"
            return assigned(results, self._named(scope, value, made), one=True)
        lines = self._plain(equation, inputs, results)
        for value, result in zip(equation.outputs, results, strict=True):
            lines += assigned([result], self._named(scope, value, result), one=True)
        return lines

    def _derivatives(self, scope: Scope, equation: Equation) -> list[str] | None:
        """Functions that give an output's tangent from each input's; None where none is needed."""
        places = [p for p, atom in enumerate(equation.inputs) if isinstance(atom, int)]
        kinds = [equation.operation.inputs[place] for place in places]
        shapes = [jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in kinds]
        literals = {
            place: atom.value
            for place, atom in enumerate(equation.inputs)
            if isinstance(atom, Constant)
        }
        assert scope.rewriting is not None
        found, reads_output = [], False
        for number, place in enumerate(places):
            if equation.inputs[place] not in scope.rewriting.summed:
                found.append("None")
                continue

            def along(tangent: Any, *given: Any, number: int = number) -> Any:
                def of_one(moved: Any) -> Any:
                    all_given = dict(literals) | dict(zip(places, given, strict=True))
                    all_given[places[number]] = moved
                    inputs = [all_given[n] for n in range(len(all_given))]
                    return internals.bind(equation.jax_equation, equation.name_stack, inputs)[0]

                return jax.jvp(of_one, [given[number]], [tangent])[1]

            closed, _ = internals.make_jaxpr(along, shapes[number], *shapes)
            inner = program_of(closed)
            again = same_as(inner, equation, places, literals)
            reads_output |= again is not None
            found.append(self._derivative(inner, again, equation, number))
        plain = not reads_output and equation.operation.primitive in _BILINEAR
        return None if plain else found

    def _derivative(
        self, program: Program, again: int | None, equation: Equation, number: int
    ) -> str:
        """Writes the derivative along one input as a function; its name."""
        distinct = self.distinct()
        arguments = [distinct.name("tangent"), distinct.name("output")]
        inputs = [distinct.name("x", numbered=True) for _ in program.arguments[1:]]
        names = value_names(program, [arguments[0], *inputs], distinct)
        equations = list(range(len(program.equations)))
        if again is not None:
            names[program.equations[again].outputs[0]] = arguments[1]
            equations.remove(again)
        scope = Scope(program=program, names=names, distinct=distinct, label="")
        lines = self._equations(scope, equations, None)
        back = f"return {self._atom_of_output(names, program.outputs[0])}"
        wanted = f"{equation.operation.primitive}_along_{number}"
        return self._defined_once(wanted, [*arguments, *inputs], lines, back)

    def _opened(
        self,
        scope: Scope,
        equation: Equation,
        loop: Loop | Choice,
        inputs: Sequence[str],
        results: Sequence[str],
    ) -> list[str]:
        """A scan in its parts, as ``transform.loops`` runs it, or a choice."""
        assert scope.rewriting is not None
        if isinstance(loop, Choice):
            return self._choice(scope, equation, loop, inputs, results)
        scan = internals.scan_of(equation.jax_equation)
        summed = scope.rewriting.summed
        program = bodies.body_of(equation, summed)
        label = f"{scope.label}{results[0]}" if results else f"{scope.label}scan"
        parts = self._parts(loop.parts, program, label)
        self.helpers |= {"one_part", "parts_in_order", "zero_of"}
        options = scan_options(scan)
        if len(loop.parts) > 1 or loop.parts[0].inside:
            options.append(f"reach={scan_reach(equation, scan, summed)}")
        return assigned(
            results,
            Call(
                self.helper(support.planned_scan),
                (f"[{', '.join(parts)}]", *scan_inputs(scan, inputs), *options),
            ),
        )

    def _choice(
        self,
        scope: Scope,
        equation: Equation,
        choice: Choice,
        inputs: Sequence[str],
        results: Sequence[str],
    ) -> list[str]:
        """A choice with its branches, as ``transform.choices`` runs it."""
        assert scope.rewriting is not None
        label = f"{scope.label}{results[0]}" if results else f"{scope.label}cond"
        programs = bodies.branches_of(equation, scope.rewriting.summed)
        functions = []
        for number, (program, branch) in enumerate(
            zip(programs, choice.branches, strict=True), start=1
        ):
            function, _ = self._body(
                program,
                branch.stages,
                branch.loops,
                frozenset(),
                f"{label}_branch_{number}",
                f"Branch {number} of {len(programs)}.",
                in_branch=True,
            )
            functions.append(function)
        return assigned(
            results, Call("lax.switch", (inputs[0], f"[{', '.join(functions)}]", *inputs[1:]))
        )

    def _body(
        self,
        program: Program,
        stages: Sequence[Stage],
        loops: Sequence[Loop | Choice],
        kept: Set[int],
        own: str,
        told: str,
        *,
        in_branch: bool = False,
    ) -> tuple[str, Scope]:
        """Writes an inner program in its stages as a function; its name, and its scope."""
        arguments = self.distinct()
        names = [arguments.name("x", numbered=True) for _ in program.arguments]
        lines, inner = self.chain(
            program, names, stages, loops, kept, f"{own}_", in_branch=in_branch
        )
        lines = [*self._constants(program, inner.names), *lines]
        outputs = [self._atom_of_output(inner.names, atom) for atom in program.outputs]
        function = self.name(own)
        self._define(function, names, told, lines, f"return {listed(outputs)}")
        return function, inner

    def _parts(self, parts: Sequence[Part], program: Program, label: str) -> list[str]:
        """Writes the body of each part of a loop; the parts as ``planned_scan`` takes them."""
        found = []
        for number, part in enumerate(parts):
            own = f"{label}_part_{number + 1}" if len(parts) > 1 else f"{label}_iteration"
            if part.inside:
                inside = self._parts(part.inside, program, own)
                found.append(f"({part.length}, [{', '.join(inside)}], (), None)")
                continue
            told = "One iteration: constants, carry and entries -> carry and entries made."
            function, inner = self._body(
                program, part.stages, part.loops, frozenset(part.kept), own, told
            )
            kept = [
                quoted(f"{own}_{inner.names[value]}")
                for index in sorted(part.kept)
                for value in program.equations[index].outputs
            ]
            found.append(f"({part.length}, [], {listed(kept)}, {function})")
        return found
