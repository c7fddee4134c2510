"""A program and its regions -> functions, and the calls that run them in order.

This writes what ``transform.rewriting`` runs. The same code is written once: pieces (``pieces``)
that occur more than once become functions, named after their module or function, and regions that
differ only in their values and in what they keep share one. For this, a function names everything
that any caller keeps, and the policy of each region says which of the names it keeps.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from remat_opt import _jax_internals as internals
from remat_opt.compilers.compiler import Rules
from remat_opt.compilers.rewrites import Place
from remat_opt.export import support
from remat_opt.export.calls import Call
from remat_opt.export.equations import Equations, Scope
from remat_opt.export.functions import Functions
from remat_opt.export.layout import assigned, checkpointed, listed, policy_decorator, returned
from remat_opt.export.literals import UnprintableError, quoted
from remat_opt.export.naming import Distinct, snake_case, word_of
from remat_opt.export.paths import Path
from remat_opt.export.pieces import Piece, Region, paths_of, turns_of
from remat_opt.export.reading import scan_hosts, scan_inputs, scan_options, scan_reach, where_from
from remat_opt.export.same import Function, Labels, Same
from remat_opt.export.sequence import Item, lines_of
from remat_opt.program import bodies
from remat_opt.program.record import Equation, Program
from remat_opt.schedule import Choice, Inside, Mapped, Part, Stage
from remat_opt.transform.steps import Step, prepared
from remat_opt.transform.turns import in_turn
from remat_opt.units import format_bytes


class Printer:
    """Writes programs as ``functions``, as these rules say."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.functions = Functions()
        self.equations = Equations(self.functions, self._opened)
        # Loops are written once, however often the surrounding text is requested.
        self._loops: dict[tuple[int, int], list[str]] = {}

    def chain(
        self,
        program: Program,
        arguments: Mapping[int, str | Path],
        stages: Sequence[Stage],
        *,
        loops: Sequence[Inside] = (),
        named: Set[int] = frozenset(),
        label: str = "",
        words: Mapping[int, str] | None = None,
    ) -> tuple[list[str], dict[int, str], dict[int, tuple[str, ...]]]:
        """Writes the regions of a program.

        Args:
          program: the program.
          arguments: the text of its arguments and constants.
          stages: the program's stages.
          loops: its opened loops.
          named: equations whose outputs carry names for a policy around all of it.
          label: the prefix of the names of what is kept.
          words: words for values whose names are known.

        Returns:
          The lines that run the regions, the text of every value known after them, and the names of
          what is kept, by equation.
        """
        one = _Chain(self, Same(), program, stages, loops, named, words or {})
        return one.run(arguments, label)

    def _opened(self, scope: Scope, index: int, inputs: Sequence[str]) -> Call:
        """A scan in parts, as ``transform.loops`` runs it, or a choice and its branches."""
        equation, loop = scope.program.equations[index], scope.loops[index]
        if isinstance(loop, Mapped):
            raise UnprintableError("a mesh")
        key = (id(scope.program), index)
        if key not in self._loops:
            name = snake_case(equation.module.rpartition("/")[2])
            if isinstance(loop, Choice):
                label = self.functions.name(name or "cond")
                self._loops[key] = self._branches(equation, loop, scope.summed, label)
            else:
                label = self.functions.name(name or "loop")
                program = bodies.body_of(equation, scope.summed)
                self._loops[key] = self._parts(loop.parts, program, label)
        inner = f"[{', '.join(self._loops[key])}]"
        if isinstance(loop, Choice):
            return Call("lax.switch", (inputs[0], inner, *inputs[1:]))
        scan = internals.scan_of(equation.jax_equation)
        options = scan_options(scan)
        # Where arrays are split, what waits has stacks of its own: the text has no mesh.
        in_gradients = bool(loop.in_gradients) and not loop.splits
        if in_gradients:
            hosts = scan_hosts(equation, scan, loop.in_gradients, self.rules.platform)
            options.append(f"hosts={hosts}")
        if in_gradients or len(loop.parts) > 1 or loop.parts[0].inside:
            options.append(f"reach={scan_reach(equation, scan, scope.summed)}")
        run = support.scan_in_gradients if in_gradients else support.planned_scan
        planned = self.functions.helper(run)
        return Call(planned, (inner, *scan_inputs(scan, inputs), *options))

    def _branches(
        self, equation: Equation, choice: Choice, summed: Set[int], label: str
    ) -> list[str]:
        """Writes each branch of a choice, as ``transform.choices`` runs it; returns their names."""
        programs = bodies.branches_of(equation, summed)
        found = []
        for number, (program, branch) in enumerate(
            zip(programs, choice.branches, strict=True), start=1
        ):
            chain = _Chain(
                self, Same(), program, branch.stages, branch.loops, frozenset(), place=Place.BRANCH
            )
            own = f"{label}_branch_{number}"
            function, _ = self._inner(chain, own, own, f"Branch {number} of {len(programs)}.")
            found.append(function)
        return found

    def _inner(
        self, chain: _Chain, own: str, label: str, told: str
    ) -> tuple[str, dict[int, tuple[str, ...]]]:
        """Writes an inner program as a function; its name, and the names of what is kept."""
        program = chain.program
        arguments = self.functions.distinct()
        names = {value: arguments.name("x", numbered=True) for value in program.arguments}
        constants = {v: arguments.name("constant", numbered=True) for v in program.constants}
        lines, known, labels = chain.run(names | constants, f"{label}.", f"{label}_")
        function = self.functions.name(own)
        outputs = [self.equations.output(known, atom) for atom in program.outputs]
        self.functions.define(
            function,
            list(names.values()),
            [
                *self.equations.constants(program, constants),
                *lines,
                f"return {listed(outputs)}",
            ],
            said=told,
        )
        return function, labels

    def _parts(
        self, parts: Sequence[Part], program: Program, label: str, same: Same | None = None
    ) -> list[str]:
        """Writes the body of each part of a loop; the parts as ``planned_scan`` takes them."""
        same = Same() if same is None else same
        chains = {
            number: _Chain(
                self,
                same,
                program,
                part.stages,
                part.loops,
                frozenset(part.kept),
                place=Place.ITERATION if part.checkpointed else Place.LOOP,
            )
            for number, part in enumerate(parts)
            if not part.inside
        }
        found = []
        for number, part in enumerate(parts):
            own = f"{label}_part_{number + 1}" if len(parts) > 1 else f"{label}_iteration"
            if part.inside:
                inside = self._parts(part.inside, program, own, same)
                found.append(f"({part.length}, [{', '.join(inside)}], (), None)")
                continue
            told = "One iteration: constants, carry and entries -> carry and entries made."
            function, labels = self._inner(chains[number], own, label, told)
            kept = [quoted(name) for index in sorted(part.kept) for name in labels[index]]
            names = listed(kept) if part.checkpointed else None
            found.append(f"({part.length}, [], {names}, {function})")
        return found


def _leaves(steps: Sequence[Step]) -> Iterator[tuple[int, ...]]:
    """The equations of each region without regions inside."""
    for step in steps:
        if step.inside:
            yield from _leaves(step.inside)
        else:
            yield step.equations


class _Chain:
    """One program being written, with its regions."""

    def __init__(
        self,
        printer: Printer,
        same: Same,
        program: Program,
        stages: Sequence[Stage],
        loops: Sequence[Inside],
        named: Set[int],
        words: Mapping[int, str] | None = None,
        *,
        place: Place = Place.TOP,
    ) -> None:
        self.words = words or {}
        self.functions, self.equations = printer.functions, printer.equations
        self.same = same
        self.program = program
        self.loops = {loop.root: loop for loop in loops}
        self.rewriting, self.steps = prepared(
            program, stages, printer.rules, named=frozenset(named), place=place
        )
        self.makers = program.makers()
        self.arguments: Mapping[int, str | Path] = {}
        # By the numbers of a region and those around it.
        self.regions: dict[tuple[int, ...], Region] = {}
        self._paths = paths_of(program, _leaves(self.steps))
        self._keys: dict[Piece, str] = {}
        self._kept_as: dict[int, tuple[str, ...]] = {}
        self._begin = ""
        self._collect(self.steps, ())

    def run(
        self, arguments: Mapping[int, str | Path], label: str, begin: str = ""
    ) -> tuple[list[str], dict[int, str], dict[int, tuple[str, ...]]]:
        """Writes all regions; see ``Printer.chain``. ``begin`` is the prefix of function names."""
        self.arguments = arguments
        self._begin = begin
        items = self._calls(self.steps, (), label)
        lines, known = lines_of(
            items, arguments, self._hint, self.functions.distinct, self.program.output_values
        )
        return lines, known, self._kept_as

    # --- what is the same -------------------------------------------------------------------

    def _collect(self, steps: Sequence[Step], around: tuple[int, ...]) -> None:
        """Goes through all regions and counts what occurs more than once."""
        for number, step in enumerate(steps):
            place = (*around, number)
            if step.inside:
                self._collect(step.inside, place)
                continue
            turns = turns_of(self.rewriting, step)
            region = self.regions[place] = Region(self.program, step, turns, self._paths)
            self._note_names(region, region.whole)
            key = self._keys[region.whole]
            seen = self.same.uses(key) > 0
            self.same.as_region[key] += 1
            if seen and _is_apart(steps, step):
                self.same.told.add(key)
            told = step.checkpointed or bool(step.named)
            if not seen:
                self._count(region.whole, told=told)
            elif told:
                # Names may not have mattered where its pieces were counted.
                self.same.told.update(self._keys[part] for part in region.whole.pieces())

    def _note_names(self, region: Region, piece: Piece) -> None:
        key = self._keys[piece] = self._key(region, piece)
        self.same.named[key].update(
            place for place, index in enumerate(piece.indices) if region.turns[index].named
        )
        self.same.reached[key].update(
            (place, number)
            for place, index in enumerate(piece.indices)
            for number, atom in enumerate(self.program.equations[index].inputs)
            if isinstance(atom, int) and atom in self.rewriting.summed
        )
        for part in piece.pieces():
            self._note_names(region, part)

    def _count(self, piece: Piece, *, told: bool) -> None:
        """Counts the pieces of one; ``told`` is whether they are called where names matter."""
        for part in piece.pieces():
            key = self._keys[part]
            seen = self.same.uses(key) > 0
            self.same.inside[key] += 1
            if told:
                self.same.told.add(key)
            if not seen:
                self._count(part, told=True)

    def _key(self, region: Region, piece: Piece) -> str:
        """The code of a piece, without names; equal results mean equal code.

        Named values without a derivative are written differently from those with one.
        """
        scope = self._scope(piece, Distinct(), ["x"] * len(piece.inputs))
        lines = [f"def ({', '.join(scope.names[value] for value in piece.inputs)}):"]
        for index in piece.indices:
            turn = region.turns[index]
            if index not in self.rewriting.ways.whole:
                turn = dataclasses.replace(turn, named=False)
            lines += self.equations.lines(scope, index, turn)
        lines += [
            f"named, without a derivative: {place}"
            for place, index in enumerate(piece.indices)
            if region.turns[index].named
            and self.rewriting.summed.isdisjoint(self.program.equations[index].value_inputs)
        ]
        lines += [
            f"under a checkpoint: {[piece.indices.index(index) for index in group]}"
            for group in region.step.twice
            if set(piece.indices).issuperset(group)
        ]
        return "\n".join([*lines, returned([scope.names[value] for value in piece.outputs])])

    def _shared(self, piece: Piece) -> bool:
        """Whether a piece of another becomes a separate function."""
        key = self._keys[piece]
        return piece.again or (self.same.inside[key] > 0 and self.same.uses(key) > 1)

    # --- functions ----------------------------------------------------------------------------

    def _scope(self, piece: Piece, distinct: Distinct, wanted: Sequence[str]) -> Scope:
        numbered = {word for word in wanted if wanted.count(word) > 1}
        names = {
            value: distinct.name(word, numbered=word in numbered)
            for value, word in zip(piece.inputs, wanted, strict=True)
        }
        for index in piece.indices:
            equation = self.program.equations[index]
            for value in equation.outputs:
                names[value] = distinct.name(word_of(equation), numbered=True)
        return Scope(
            program=self.program,
            names=names,
            distinct=distinct,
            ways=self.rewriting.ways,
            summed=self.rewriting.summed,
            loops=self.loops,
        )

    def _function(
        self,
        region: Region,
        piece: Piece,
        wanted: str,
        *,
        label: str = "",
        said: str = "",
        decorated: bool = False,
    ) -> Function:
        """Writes a piece as a function, once.

        Args:
          region: the region that contains it.
          piece: the piece.
          wanted: its name, if nothing says what it is part of.
          label: the prefix of the names in it, unless the caller passes one.
          said: its docstring.
          decorated: whether to put it under the region's checkpoint.
        """
        key = self._keys[piece]
        takes_at = bool(self.same.named[key]) and key in self.same.told
        found = self.same.written.get((key, "" if takes_at else label))
        if found is not None:
            return found
        inputs = self._argument_names(piece)
        scope = self._scope(piece, self.functions.distinct(["at"]), inputs)
        reached = [
            self.program.equations[piece.indices[place]].inputs[number]
            for place, number in self.same.reached[key]
        ]
        scope = dataclasses.replace(
            scope,
            summed=scope.summed.union(one for one in reached if isinstance(one, int)),
            label="" if takes_at else label,
            takes_at=takes_at,
        )
        labels: Labels = {}
        lines = self._body(region, piece, scope, labels)
        name = self.functions.name(wanted)
        arguments = ["at"] if takes_at else []
        arguments += [scope.names[value] for value in piece.inputs]
        # The label is part of the names, unless the caller passes one.
        if decorated:
            decorator = self._decorator(region, labels, label)
        else:
            decorator = policy_decorator(()) if piece.again else []
        self.functions.define(
            name,
            arguments,
            [*lines, returned([scope.names[value] for value in piece.outputs])],
            said=said,
            decorator=decorator,
        )
        found = Function(name=name, takes_at=takes_at, labels=labels)
        self.same.written[key, "" if takes_at else label] = found
        return found

    def _body(self, region: Region, piece: Piece, scope: Scope, labels: Labels) -> list[str]:
        """The lines of a piece; the names in it are added to ``labels``."""
        named = self.same.named[self._keys[piece]]
        place = {index: n for n, index in enumerate(piece.indices)}
        lines: list[str] = []
        said = ""
        used: Counter[str] = Counter()

        def write(parts: Sequence[int | Piece]) -> None:
            nonlocal said
            for part in parts:
                if isinstance(part, int):
                    where = where_from(self.program.equations[part])
                    if where and where != said:
                        lines.append(f"# {where}")
                        said = where
                    turn = dataclasses.replace(region.turns[part], named=place[part] in named)
                    lines.extend(self.equations.lines(scope, part, turn))
                    if turn.named:
                        outputs = self.program.equations[part].outputs
                        labels[place[part]] = tuple(scope.names[value] for value in outputs)
                elif not self._shared(part):
                    write(part.parts)
                else:
                    call_of(part)
                    said = ""

        def call_of(part: Piece) -> None:
            function = self._function(region, part, self._wanted(part))
            given = [scope.names[value] for value in part.inputs]
            if function.takes_at:
                used[function.name] += 1
                number = used[function.name]
                before = f"{function.name}_{number}." if number > 1 else f"{function.name}."
                written = quoted(f"{scope.label}{before}")
                given.insert(0, f"at + {written}" if scope.takes_at else written)
                for inner, names in function.labels.items():
                    own = place[part.indices[inner]]
                    labels[own] = tuple(f"{before}{name}" for name in names)
            results = [scope.names[value] for value in part.outputs]
            lines.extend(assigned(results, Call(function.name, tuple(given)), unpack=True))

        write(piece.parts)
        return lines

    def _wanted(self, piece: Piece, otherwise: str = "block") -> str:
        """What to call a piece: after its module or function, without the distinguishing number."""
        if not piece.name and piece.in_block:
            return piece.in_block
        name = snake_case(re.sub(r"_?\d+$", "", piece.name))
        several = not piece.path or piece.path[0][0] != ""
        return f"{name}s" if name and several else name or otherwise

    def _argument_names(self, piece: Piece) -> list[str]:
        """What to call the inputs: arguments by the end of their paths."""
        paths = {
            value: given.words
            for value in piece.inputs
            if isinstance(given := self.arguments.get(value), Path)
        }
        # The same number of words for all, as few as distinguish them (if words can).
        most = max((len(words) for words in paths.values()), default=1)
        told = [len({words[-n:] for words in paths.values()}) for n in range(1, most + 1)]
        length = told.index(max(told)) + 1
        return [
            "_".join(paths[value][-length:]) if value in paths else self._hint(value)
            for value in piece.inputs
        ]

    def _hint(self, value: int) -> str:
        """A word for a value."""
        given = self.arguments.get(value)
        if isinstance(given, Path):
            return given.words[-1]
        if value in self.words:
            return self.words[value]
        maker = self.makers.get(value)
        word = "x" if maker is None else word_of(self.program.equations[maker])
        return "x" if word in ("add", "sum") else word

    # --- regions ------------------------------------------------------------------------------

    def _calls(self, steps: Sequence[Step], around: tuple[int, ...], label: str) -> list[Item]:
        """The calls that run steps, as ``rewriting._run`` runs them."""
        items: list[Item] = []

        def behind(barrier: Callable[..., Any], *groups: Sequence[int]) -> Iterator[Item]:
            for values in map(tuple, filter(None, groups)):
                function = self.functions.helper(barrier)
                yield Item(function=function, reads=values, writes=values, unpack=False)

        for number, turn in enumerate(in_turn(self.rewriting, steps)):
            step = turn.step
            own = f"{label}{number + 1}." if _is_apart(steps, step) else label
            items += behind(support.stored, turn.delayed)
            items += behind(support.behind_barrier, turn.before)
            items += self._step(step, (*around, number), own)
            items += behind(support.behind_barrier, *turn.after)
        return items

    def _step(self, step: Step, place: tuple[int, ...], label: str) -> list[Item]:
        number = "_".join(str(one + 1) for one in place)
        wanted = f"{self._begin}region_{number}"
        if step.inside:
            return [self._nested(step, place, label, wanted)]
        region = self.regions[place]
        if not step.checkpointed and not step.named:
            return self._unchecked(region, wanted)
        whole = region.whole
        key = self._keys[whole]
        first: tuple[str, ...] = ()
        if not step.checkpointed:
            function = self._function(region, whole, self._wanted(whole, wanted), label=label)
            name = function.name
            first = (quoted(label),) if function.takes_at else ()
        elif self.same.uses(key) == 1:
            function = self._function(
                region, whole, wanted, label=label, said=self._said(step), decorated=True
            )
            name = function.name
        else:
            body = self._wanted(whole, f"body_of_{wanted}")
            function = self._function(region, whole, body, label=label)
            name = self._checkpointed(region, function, label, wanted)
        self._kept_as |= {
            whole.indices[inner]: tuple(f"{label}{one}" for one in names)
            for inner, names in function.labels.items()
        }
        return [Item(function=name, first=first, reads=whole.inputs, writes=whole.outputs)]

    def _kept(self, region: Region, labels: Labels, label: str) -> list[str]:
        """The names that the policy of a region keeps."""
        place = {index: n for n, index in enumerate(region.whole.indices)}
        kept = sorted(region.step.kept)
        return [f"{label}{name}" for index in kept for name in labels[place[index]]]

    def _decorator(self, region: Region, labels: Labels, label: str) -> list[str]:
        return policy_decorator(self._kept(region, labels, label))

    def _checkpointed(self, region: Region, function: Function, label: str, wanted: str) -> str:
        """Puts a function under the checkpoint of a region; returns the result's name."""
        names = self._kept(region, function.labels, label)
        run = function.name
        if function.takes_at:
            run = f"functools.partial({run}, {quoted(label)})"

        def write(name: str) -> None:
            said = f"# {self._said(region.step)}"
            lines = checkpointed(name, run, names)
            self.functions.texts.append("\n".join([said, *lines]))

        return self.functions.once(f"{run} {names}", wanted, write)

    def _unchecked(self, region: Region, wanted: str) -> list[Item]:
        """The calls of a region without a checkpoint: calls of its pieces, if some are shared."""
        pieces: list[Piece] = []
        between: list[int | Piece] = []

        def close() -> None:
            if between:
                indices = [
                    index
                    for part in between
                    for index in ([part] if isinstance(part, int) else part.indices)
                ]
                pieces.append(region.piece(indices, tuple(between)))
                between.clear()

        for part in region.whole.parts:
            if isinstance(part, Piece) and self._shared(part):
                close()
                pieces.append(part)
            else:
                between.append(part)
        close()
        # A function rebinds its arguments only locally; what comes out of it is another matter.
        if len(pieces) == 1 or any(set(one.inputs) & set(one.outputs) for one in pieces):
            pieces = [region.whole]
        items = []
        for piece in pieces:
            if piece not in self._keys:
                self._note_names(region, piece)
            function = self._function(region, piece, self._wanted(piece, wanted))
            first = ('""',) if function.takes_at else ()
            items.append(
                Item(function=function.name, first=first, reads=piece.inputs, writes=piece.outputs)
            )
        return items

    def _nested(self, step: Step, place: tuple[int, ...], label: str, wanted: str) -> Item:
        """Writes a region with regions inside."""
        name = self.functions.name(wanted)
        items = self._calls(step.inside, place, f"{label}{place[-1] + 1}.")
        hints = [self._hint(value) for value in step.inputs]
        distinct = self.functions.distinct()
        given = {
            value: distinct.name(hint, numbered=hints.count(hint) > 1)
            for value, hint in zip(step.inputs, hints, strict=True)
        }
        lines, known = lines_of(items, given, self._hint, self.functions.distinct, step.outputs)
        names = [one for index in sorted(step.kept) for one in self._kept_as[index]]
        self.functions.define(
            name,
            list(given.values()),
            [*lines, returned([known[value] for value in step.outputs])],
            said=self._said(step),
            decorator=policy_decorator(names),
        )
        return Item(function=name, reads=step.inputs, writes=step.outputs)

    def _said(self, step: Step) -> str:
        """What a region does, in a sentence."""
        sizes = [
            self.program.types[value].bytes
            for index in step.kept
            for value in self.program.equations[index].outputs
        ]
        if not sizes:
            return "Keeps only its inputs; everything is computed again in the backward pass."
        kept = format_bytes(sum(sizes))
        return f"Keeps {kept} by name; the rest is computed again in the backward pass."


def _is_apart(steps: Sequence[Step], step: Step) -> bool:
    """Whether a policy around the steps must distinguish names in one from those in another."""
    return len(steps) > 1 and not step.inside and step.named != step.kept
