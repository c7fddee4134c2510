"""Which values of a program a compiler stores, and how large they are.

XLA fuses: a cheap elementwise result lives inside the kernels that read it and is never written to
memory. A planner that counts every jaxpr value keeps the wrong things. A value is assumed to be
stored if

* an opaque equation or a reduction makes it (dot, conv, sort, scan, reduce_sum, ...),
* an opaque equation reads it,
* it is an output of the program,
* several vertices would have to read more bytes to recompute it than it has itself
  (the sum that forms a residual stream), or
* a rule about the compiler says so (``rules``).

Reshapes and the like are other names for the same bytes. All other values belong to the vertices
that read them: the transform emits them again where needed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set

from remat_opt import costs
from remat_opt.compilers import (
    batched_products,
    cpu_sums,
    draws,
    entry_gathers,
    flat_products,
    grouped_rows,
    joins,
    operands,
    places,
    product_sums,
    row_gathers,
    softmax,
    spectra,
    squares,
    strides,
    sums,
    transcendental,
    vector_products,
)
from remat_opt.compilers.compiler import Compiler
from remat_opt.compilers.lanes import convolved, gathered
from remat_opt.compilers.matrix_axes import Matrices, matrix_axes
from remat_opt.operation import ASSEMBLED, PRODUCTS, SCATTERS, ArrayType, Operation
from remat_opt.program.dataflow import Dataflow
from remat_opt.program.record import Linearization, Program

#: A fused value is given a buffer when computing it again in each of several readers would
#: read more than this many times its own bytes.
_REREAD_LIMIT = 1.25

#: ... or when it would repeat more than this many equations in each of them.
_CONE_LIMIT = 64


def dataflow(program: Program, linearization: Linearization, compiler: Compiler) -> Dataflow:
    """A program's values as a compiler sees them.

    Args:
      program: a traced function.
      linearization: what its backward steps read.
      compiler: the compiler.
    """
    program = vector_products.as_compiled(program, compiler)
    fused = frozenset({"gather"}) if compiler.has("rows_fused") else frozenset[str]()
    return Dataflow(program, linearization, fused)


class Storage:
    """What a compiler stores of a program.

    Attributes:
      flow: the program's dataflow.
      compiler: the compiler.
      outputs: the program's output values, aliases resolved.
      softmaxes: those whose exponentials are stored.
      stores_maxima: whether ``transform`` stores their maxima instead.
      scores: their stored scores, each with the resulting weights.
      weights_of: the same or, in unchanged functions, for exponentials; and for stored logits minus
        their maximum the logits as they came.
      rounded: the float32 values that are stored as bfloat16, with how many products read them.
      completed: for what a product writes, the form stored in its place.
      batched_reads: how batched products read elementwise operands.
      product_sums: the sums of two products that are stored, with the products.
      rewritten: whether rewriting changes what is stored.
      groups: rows that are looked up in groups, and how these are laid out.
      regroupings: reshapes of such rows that are kernels.
      pieces: stored pieces of concatenations that products read.
      stored: the values that are arrays.
      leaves: for each fused value, the arrays and arguments it is computed from.
      roots: the equations that make arrays, or have effects, ascending.
      vertex_of: for each array, the number of its root among them.
    """

    def __init__(self, flow: Dataflow, compiler: Compiler, *, unchanged: bool = False) -> None:
        """Finds what is stored.

        Args:
          flow: the program's dataflow.
          compiler: the compiler.
          unchanged: whether nothing is rewritten for it.
        """
        program = flow.program
        self.flow, self.compiler = flow, compiler
        self.outputs = {flow.source[value] for value in program.output_values}
        self.softmaxes = tuple(
            one
            for one in softmax.rounded(program, compiler.rules)
            if one.waiting != one.exponentials
            or not softmax.is_computed_again(program.types[one.exponentials], compiler.device)
        )
        self.weights_of: dict[int, int] = {}
        self.stores_maxima = bool(self.softmaxes) and compiler.has("maxima_stored")
        if unchanged or not self.stores_maxima:
            self.weights_of = {one.waiting: one.weights for one in self.softmaxes}
            self.weights_of |= {
                one.exponentials: one.weights
                for one in self.softmaxes
                if batched_products.rows_lie_apart(flow, one.weights, compiler, batch_axes=2)
            }
        active = flow.linearization.active_values
        self.weights_of |= softmax.shifted(program, compiler.rules, active)
        self.batched_reads = tuple(
            batched_products.reads(
                flow, compiler, set(softmax.exponentials(program)), self.weights_of
            )
        )
        stored_sums = dict(product_sums.stored_sums(program, compiler.rules))
        self.product_sums = {} if unchanged else stored_sums
        self.rounded: dict[int, int] = {}
        self.completed: dict[int, int] = {}
        self._product_of: dict[int, int] = {}
        if compiler.has("operands_rounded"):
            self.rounded = operands.rounded(flow, self.outputs)
        if compiler.has("forms_completed"):
            self.completed = operands.completed(flow, self.outputs, self.rounded)
        if compiler.has("sums_in_products"):
            whole = product_sums.sums_in_products(program)
            self.completed |= whole
            self._product_of = {made: flow.maker[product] for product, made in whole.items()}
        axes = compiler.has("matrix_axes")
        self._matrices: dict[int, Matrices] = matrix_axes(program) if axes else {}
        around = convolved(program) if compiler.has("lanes") else {}
        for value in around:
            # What a product reads of a convolution's result is copied for it.
            self._matrices.pop(value, None)
        self._lanes = around | gathered(program) if compiler.has("lanes") else {}
        self.groups = grouped_rows.groups(flow, compiler)
        self.regroupings = tuple(grouped_rows.regroupings(flow, compiler))
        twice = cpu_sums.divided(flow) if compiler.has("divisors") else set()
        if compiler.has("words_stored"):
            twice |= draws.words(flow)
        flat = flat_products.with_operands(flow, compiler)
        twice |= {value for value, always in flat.items() if always or not unchanged}
        self._times = dict.fromkeys(twice, 2)
        self._spectra = spectra.whole(program, compiler)
        picked = row_gathers.stored(flow, compiler.rules)
        looked_up_flat = bool(entry_gathers.flattening(program, compiler.rules))
        # For gathers as they are.
        listed = (
            entry_gathers.listed(flow, compiler.rules) if unchanged or not looked_up_flat else {}
        )
        self._times |= listed
        self._gathered = {*(picked if unchanged else ()), *listed}
        self.rewritten = bool(
            self.stores_maxima or stored_sums or picked or looked_up_flat or not all(flat.values())
        )
        self.pieces = joins.stored(flow, compiler)
        self._reread = self._read_backward()
        self.stored, self.leaves = self._find()
        self.scores = {} if self.weights_of else dict(self._scores())
        self.weights_of |= self.scores
        self.roots = tuple(
            index
            for index, equation in enumerate(program.equations)
            if not flow.is_alias(index)
            and (equation.effects or any(value in self.stored for value in equation.outputs))
        )
        self.vertex_of = {
            value: vertex
            for vertex, root in enumerate(self.roots)
            for value in program.equations[root].outputs
        }

    # --------------------------------------------------------------------------- how large

    def bytes_of(self, value: int) -> int:
        """Bytes of a value if it is stored."""
        kind = self._spectra.get(value, self.flow.program.types[value])
        if value in self.rounded:
            kind = operands.as_operand(kind)
        return self._laid_out_bytes(value, kind) * self._times.get(value, 1)

    def named_bytes(self, value: int) -> int:
        """Bytes of a value if a checkpoint keeps it by name."""
        alone = value in self._times or value in self._spectra
        if alone or any(map(self.compiler.has, ("widened", "divisors"))):
            return self.compiler.buffer_bytes(self.flow.program.types[value])
        return self.bytes_of(value)

    def read_bytes(self, value: int) -> int:
        """Bytes of a value as read by products that take whole arrays."""
        return self._laid_out_bytes(value, self.flow.program.types[value])

    def cotangent_bytes(self, values: Iterable[int]) -> int:
        """Bytes of the gradients with respect to some values: products write them in full.

        That of scores or exponentials is written like that of their weights.
        """
        return sum(self._laid_out_bytes(value, self._cotangent_type(value)) for value in values)

    def _cotangent_type(self, value: int) -> ArrayType:
        flow = self.flow
        kind = self._spectra.get(value, flow.program.types[value])
        weights = self.weights_of.get(value)
        if weights is not None and not batched_products.rows_lie_apart(
            flow, weights, self.compiler
        ):
            kind = flow.program.types[weights]
        if value not in flow.maker:
            return kind
        maker = flow.program.equations[flow.maker[value]].operation
        return batched_products.as_read(maker, kind, self.compiler)

    def operand_bytes(self, index: int) -> int:
        """Bytes of the gradient with respect to a product, as products read it."""
        types = self.flow.program.types
        return sum(
            self._laid_out_bytes(value, operands.as_operand(types[value]))
            for value in self.flow.program.equations[index].outputs
        )

    def _laid_out_bytes(self, value: int, kind: ArrayType) -> int:
        """Bytes of an array of some type that is laid out like a value."""
        if self.compiler.has("widened"):
            kind = cpu_sums.widened(kind)
        matrices = self._matrices.get(value)
        if matrices is not None:
            kind = dataclasses.replace(kind, shape=matrices.shape)
            return self.compiler.buffer_bytes(kind, matrices.axes)
        if value in self.groups:
            return grouped_rows.stored_bytes(self.groups[value], kind, self.compiler)
        return self.compiler.buffer_bytes(kind, lanes=self._lanes.get(value))

    # ------------------------------------------------------------------------ what and where

    def is_fusing_product(self, index: int) -> bool:
        """Whether the equation is a product that computes elementwise operands as it reads them."""
        operation = self.flow.program.equations[index].operation
        return self.compiler.has("operands_fused") and operation.primitive in PRODUCTS

    def computes_operands(self, index: int) -> bool:
        """Whether the equation's kernel computes elementwise operands as it reads them."""
        primitive = self.flow.program.equations[index].operation.primitive
        fused = self.compiler.has("rows_fused") and primitive in SCATTERS
        return fused or self.is_fusing_product(index)

    def written_by(self, vertex: int) -> int:
        """The equation whose kernel writes a vertex: for a sum of products one of them."""
        root = self.roots[vertex]
        made = self.flow.program.equations[root].outputs
        return next((self._product_of[value] for value in made if value in self._product_of), root)

    def result(self, index: int) -> int:
        """What an equation makes, or the first of its results."""
        return self.flow.program.equations[index].outputs[0]

    def is_read_as_written(self, value: int) -> bool:
        """Whether products read the cotangent of what a product writes in that value's type."""
        return self._cotangent_type(value) == self.flow.program.types[value]

    def holders(self, value: int) -> Sequence[int]:
        """The vertices to hold in order to have a value."""
        value = self.flow.source[value]
        if value in self.vertex_of:
            return (self.vertex_of[value],)
        leaves = self.leaves.get(value, ())
        return tuple(self.vertex_of[leaf] for leaf in leaves if leaf in self.vertex_of)

    def vertices_of(self, values: Iterable[int]) -> tuple[int, ...]:
        """The vertices that hold those of some values that are arrays."""
        found = {self.vertex_of[value] for value in values if value in self.vertex_of}
        return tuple(sorted(found))

    def cone(self, root: int) -> list[int]:
        """The root equation and the fused equations behind it, in program order."""
        found = {root}
        pending = [root]
        while pending:
            for value in self.flow.program.equations[pending.pop()].value_inputs:
                maker = self.flow.maker.get(value)
                if maker is None or maker in found:
                    continue
                if self.flow.source[value] in self.stored and not self.flow.is_alias(maker):
                    continue
                found.add(maker)
                pending.append(maker)
        return sorted(found)

    def _forced(self) -> set[int]:
        """Values that are stored whatever the fan-out."""
        forced: set[int] = set()
        computed = self._computed_rows()
        again = {(one.product, one.operand) for one in self.batched_reads if one.again}
        for index, equation in enumerate(self.flow.program.equations):
            if self.flow.opaque(index) or self.flow.costs[index].fusion is costs.Fusion.REDUCTION:
                forced.update(equation.outputs)
            if self.flow.opaque(index) and not self.computes_operands(index):
                forced.update(
                    value
                    for value in self.flow.reads(index)
                    if value not in computed and (index, value) not in again
                )
        if self.compiler.has("stored_for_sums"):
            forced |= cpu_sums.read_by_sums(self.flow)
        forced |= transcendental.stored(self.flow, self.compiler)
        forced |= sums.stored(self.flow, self.compiler)
        forced |= draws.stored(self.flow, self.compiler)
        forced |= strides.stored(self.flow, self.compiler)
        forced |= self.pieces
        forced.update(one.repeated for one in self.regroupings if one.repeated is not None)
        forced |= self._gathered
        for index in self.product_sums:
            forced.update(self.flow.program.equations[index].outputs)
        forced.update(self.weights_of)
        forced -= self.completed.keys()
        forced.update(self.completed.values())
        forced.update(
            self.flow.source[value]
            for value in self.flow.program.output_values
            if self.flow.source[value] in self.flow.maker
        )
        return forced

    def _computed_rows(self) -> set[int]:
        """What only a lookup reads, if that computes it for the rows that it takes."""
        if not self.compiler.has("rows_computed"):
            return set()
        flow, equations = self.flow, self.flow.program.equations
        readers = flow.reader_counts()
        dear = transcendental.dear(self.compiler.device.platform)
        looked_up_in = (one.inputs[0] for one in equations if one.operation.primitive == "gather")
        return {
            value
            for value in (flow.source[atom] for atom in looked_up_in if isinstance(atom, int))
            if readers[value] == 1 and equations[flow.maker[value]].operation.primitive not in dear
        }

    def _find(self) -> tuple[set[int], dict[int, frozenset[int]]]:
        """The stored values, and for each fused one, what it is computed from.

        What reads a value depends on what else is stored, so this is computed twice: a value that
        only goes into another stored one has one reader.
        """
        forced = self._forced()
        stored, leaves = self._with_shared(forced, self._reader_counts(forced))
        apart = places.apart(self.flow, stored, self.compiler)
        if apart:
            forced |= apart
            stored, leaves = self._with_shared(forced, self._reader_counts(forced))
        if self.compiler.has("readers_recounted"):
            readers = self._reader_counts(stored)
            if any(readers.get(value, 0) < 2 for value in stored - forced):
                stored, leaves = self._with_shared(forced, readers)
        return stored, leaves

    def _with_shared(
        self, forced: Set[int], readers: Mapping[int, int]
    ) -> tuple[set[int], dict[int, frozenset[int]]]:
        """The forced values, those that are shared and expensive to recompute, and the leaves.

        Args:
          forced: what is stored anyway.
          readers: how many vertices would read each fused value.
        """
        stored = set(forced)
        direct = self.flow.reader_counts()
        moved = places.moved(self.flow, self.compiler)
        # Fused values that are computed from rows of something larger.
        looked_up: set[int] = set()
        # For each leaf and the last move on the way from it, the bytes that are read.
        read_at: dict[int, dict[tuple[int, int | None], float]] = {}
        # For each leaf, the bytes that are read, and how many equations lie in between.
        read_bytes: dict[int, dict[int, float]] = {}
        sizes: dict[int, int] = {}
        types = self.flow.program.types
        for index, equation in enumerate(self.flow.program.equations):
            if self.flow.is_alias(index):
                continue
            found: dict[int, float] = {}
            at: dict[tuple[int, int | None], float] = {}
            moves = equation.operation.primitive in places.MOVES
            size = 1
            wide = self._looks_up_in_more(equation.operation)
            for value in {self.flow.source[value] for value in equation.value_inputs}:
                if value in read_bytes and value not in stored:
                    wide |= value in looked_up
                    size += sizes[value]
                    own = read_bytes[value]
                    own_at = read_at[value]
                else:
                    own = {value: types[value].bytes}
                    own_at = {(value, None): types[value].bytes}
                for (leaf, move), amount in own_at.items():
                    if moves:
                        at[leaf, index] = amount + at.get((leaf, index), 0)
                    else:
                        at[leaf, move] = max(amount, at.get((leaf, move), 0))
                for leaf, amount in own.items():
                    found[leaf] = max(amount, found.get(leaf, 0))
            for value in equation.outputs:
                part = self._part(equation.operation, types[value])
                read_bytes[value] = {leaf: amount * part for leaf, amount in found.items()}
                read_at[value] = {place: amount * part for place, amount in at.items()}
                sizes[value] = size
                if wide:
                    looked_up.add(value)
                if value in stored or not readers.get(value, 0):
                    continue
                if value in self._reread:
                    limit = places.MOST_READ * types[value].bytes
                    if sum(read_at[value].values()) > limit:
                        stored.add(value)
                        continue
                if readers[value] < 2:
                    continue
                total = sum(read_bytes[value].values())
                if (
                    self._put_together(equation.operation)
                    or (value in moved and total and not self._replaces(value, found, direct))
                    or (wide and direct[value] > 1)
                    or total > _REREAD_LIMIT * types[value].bytes
                    or size > _CONE_LIMIT
                ):
                    stored.add(value)
        return stored, {value: frozenset(found) for value, found in read_bytes.items()}

    def _read_backward(self) -> set[int]:
        """The values that backward steps read, where reading many arrays again is avoided.

        Not masks: what reads one mostly reads what it is computed from as well.
        """
        if not self.compiler.has("reread_backward"):
            return set()
        flow = self.flow
        return {
            value
            for index in flow.linearization.derivatives
            for value in flow.derivative_reads(index)
            if flow.program.types[value].dtype != "bool"
        }

    def _replaces(self, value: int, leaves: Iterable[int], readers: Mapping[int, int]) -> bool:
        """Whether a value would be stored in the place of something as large that it is made of."""
        types = self.flow.program.types
        return any(
            readers[leaf] == 1 and types[leaf].bytes >= types[value].bytes for leaf in leaves
        )

    def _part(self, operation: Operation, result: ArrayType) -> float:
        """The part of its operand that an operation reads for a result."""
        of_part = (
            self.compiler.has("slices_read_parts") and operation.primitive in places.SLICES
        ) or self._looks_up(operation)
        if not of_part or not operation.inputs[0].bytes:
            return 1.0
        return min(1.0, result.bytes / operation.inputs[0].bytes)

    def _put_together(self, operation: Operation) -> bool:
        """Whether a result is stored as soon as it is read twice."""
        return self.compiler.has("concatenations") and operation.primitive in ASSEMBLED

    def _looks_up(self, operation: Operation) -> bool:
        """Whether it is a lookup that is part of the kernels that read its result."""
        return self.compiler.has("rows_fused") and operation.primitive == "gather"

    def _looks_up_in_more(self, operation: Operation) -> bool:
        """Whether it is such a lookup, in something larger than the result.

        Where that is computed again, its gradient is a scatter into something as large.
        """
        return self._looks_up(operation) and operation.inputs[0].bytes > operation.outputs[0].bytes

    def _reader_counts(self, stored: Set[int]) -> dict[int, int]:
        """How many vertices (counted up to 2) would read each fused value."""
        roots: dict[int, set[Hashable]] = {}
        squared = {index for index, _ in squares.squares(self.flow.program)}
        for index in reversed(range(len(self.flow.program.equations))):
            if self.flow.is_alias(index):
                continue
            outputs = self.flow.program.equations[index].outputs
            reached: set[Hashable]
            if not stored.isdisjoint(outputs) or self.flow.opaque(index):
                # A product that reads a value from both sides counts as two.
                reached = {index, ~index} if index in squared else {index}
            else:
                reached = set().union(*(roots.get(value, ()) for value in outputs))
                if self.flow.program.equations[index].operation.primitive in places.MOVES:
                    # In one kernel too, an entry is computed again wherever it is read.
                    reached = {(value, one) for value in outputs for one in roots.get(value, ())}
            for value in self.flow.reads(index):
                known = roots.setdefault(value, set())
                if len(known) < 2:
                    # Of any two, at least one is new.
                    known.update(itertools.islice(reached, 2))
        return {value: min(2, len(found)) for value, found in roots.items()}

    def _scores(self) -> Iterator[tuple[int, int]]:
        """The stored scores of softmaxes with stored maxima, and the weights."""
        types = self.flow.program.types
        for one in self.softmaxes:
            for leaf in self.leaves.get(self.flow.source[one.weights], ()):
                if leaf in self.flow.maker and types[leaf].size == types[one.weights].size:
                    yield leaf, one.weights
