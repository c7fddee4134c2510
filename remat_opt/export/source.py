"""The whole file: imports, helpers, a function for each region, and the user's function."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import textwrap
from collections import Counter
from collections.abc import Sequence, Set
from pathlib import Path as File
from typing import Any

import jax

from remat_opt import _jax_internals as internals
from remat_opt.compilers.compiler import Rules
from remat_opt.errors import RematError
from remat_opt.export import support
from remat_opt.export.calls import Call as Expression
from remat_opt.export.layout import INDENT, WIDTH, assigned, listed
from remat_opt.export.literals import UnprintableError, constant_text, quoted
from remat_opt.export.naming import Distinct, identifier
from remat_opt.export.paths import Path, paths_of
from remat_opt.export.paths import Step as PathStep
from remat_opt.export.regions import Printer
from remat_opt.plan import Plan
from remat_opt.program.record import Program
from remat_opt.program.tracing import Call, array_type
from remat_opt.units import format_bytes, format_share

#: What ``support`` and exported code import: the header of a file.
_IMPORTS = """\
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
"""

#: What follows there, if a helper needs it.
_LAYOUT_IMPORT = "from jax.experimental.layout import Layout, with_layout_constraint\n"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A planned function as a Python module that needs only JAX.

    Attributes:
      function: the name of the function in it.
      text: the module.
      constants: the arrays that the function closed over; it takes them as ``constants=``, by
        keyword. If there are none, this is empty, and the arguments are those of the original.
      closed_over: the variables of the step around it that the function read, such as
        ``batch['image']``; it takes their arrays, in this order, as ``closed_over=``, by keyword.
    """

    function: str
    text: str
    constants: tuple[Any, ...]
    closed_over: tuple[str, ...] = ()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the module to a file."""
        File(path).write_text(self.text, encoding="utf-8")

    def load(self) -> Any:
        """Returns the function, as importing the saved module would."""
        module: dict[str, Any] = {"__name__": self.function}
        exec(compile(self.text, f"<{self.function} as source>", "exec"), module)
        function = module[self.function]
        return functools.partial(function, constants=self.constants) if self.constants else function

    def __str__(self) -> str:
        return self.text


def source_of(plan: Plan, program: Program, call: Call) -> Source:
    """A planned program as code, which is read back and must trace to the same equations.

    Args:
      plan: what was decided.
      program: what it was decided for.
      call: what was traced.

    Raises:
      RematError: something in the program cannot be written as code; the message names it.
    """
    rules, stages = Rules(platform=plan.platform), plan.stages
    if plan.unchanged:
        rules, stages = Rules.none(plan.platform), ()
    printer = Printer(rules)
    functions = printer.functions
    function = functions.name(identifier(plan.function))
    unpacked, arguments = _arguments(call, functions.distinct(_parameters(call)))
    explicit = program.arguments[: len(arguments)]
    given = dict(zip(explicit, arguments, strict=True))
    given |= _by_number("constants", "constant", program.constants)
    given |= _by_number("closed_over", "closed_over", program.arguments[len(arguments) :])
    lines, names, _ = printer.chain(
        program, given, stages, loops=plan.loops, words=_words_of_results(program)
    )
    try:
        results = [
            names[atom] if isinstance(atom, int) else _constant(atom.value)
            for atom in program.outputs
        ]
        returned = _tree_text(program.output_tree, results)
    except UnprintableError as error:
        raise RematError(
            f"The result of {plan.function!r} cannot be written as code: {error}."
        ) from None
    head = _signature(call, program)
    body = [
        *_docstring(plan, program, call, arguments),
        f"count = len(jax.tree.leaves({listed(_parameters(call))}))",
        f"if count != {len(arguments)}:",
        f'    raise ValueError(f"{len(arguments)} arrays are wanted, not {{count}}.")',
        *unpacked,
        *lines,
        *f"return {returned}".split("\n"),
    ]
    main = "\n".join([f"def {function}({head}):", *(f"    {line}".rstrip() for line in body)])
    helpers = _helpers(functions.helpers)
    imports = _IMPORTS
    if any("with_layout_constraint" in text for text in helpers):
        imports += _LAYOUT_IMPORT
    parts = [_header(plan, function, imports), *helpers, *functions.texts, main]
    text = "\n\n\n".join(parts)
    found = Source(
        function=function,
        text=text + "\n",
        constants=program.constant_values,
        closed_over=program.closed_over_names,
    )
    otherwise = {"gather"} if support.summed.__name__ in functions.helpers else set()
    _check(found, program, call, _GROUPING | otherwise)
    return found


def _by_number(root: str, word: str, values: Sequence[int]) -> dict[int, Path]:
    """The arrays of a sequence, by position."""
    return {
        value: Path(root, (PathStep("[", number, "]"),), (word,))
        for number, value in enumerate(values)
    }


def _header(plan: Plan, function: str, imports: str) -> str:
    predicted = plan.predicted
    said = (
        f"{plan.function}, with what is kept for its gradient and what is computed again decided "
        f"by remat_opt {plan.remat_opt_version} for {plan.device}. This file needs JAX alone "
        f"(it was written with {plan.jax_version})."
    )
    figures = (
        f"Temporaries, predicted: {format_bytes(predicted.temporary_bytes)}, of "
        f"{format_bytes(predicted.plain_temporary_bytes)} without checkpoints; recomputed: "
        f"{format_share(predicted.recomputed_share)} of the FLOPs of a forward pass."
    )
    use = (
        f"Use {function} in place of the original: its arguments must have the same shapes "
        "and dtypes, and the same ones must be differentiated. Static arguments are left out: "
        "their values are those at the time of writing."
    )
    paragraphs = [textwrap.fill(one, 96) for one in (said, figures, use)]
    return '"""' + "\n\n".join(paragraphs) + '\n"""\n\n' + imports.rstrip()


def _helpers(names: set[str]) -> list[str]:
    """The text of helpers and of those they call, in the order of their file."""
    functions = dict(inspect.getmembers(support, inspect.isfunction))
    own = {
        name: inspect.getsource(function)
        for name, function in functions.items()
        if function.__module__ == support.__name__
    }
    wanted = set(names)
    pending = list(names)
    while pending:
        words = set(re.findall(r"\w+", own[pending.pop()]))
        more = own.keys() & words
        pending += more - wanted
        wanted |= more
    in_order = sorted(wanted, key=lambda name: functions[name].__code__.co_firstlineno)
    return [own[name].rstrip() for name in in_order]


def _signature(call: Call, program: Program) -> str:
    words = [*_positional(call)]
    keywords = sorted(call.kwargs)
    if program.constants:
        keywords.append("constants")
    if program.closed_over:
        keywords.append("closed_over")
    if keywords:
        words += ["*", *keywords]
    return ", ".join(words)


def _positional(call: Call) -> list[str]:
    return [label if isinstance(label, str) else f"argument_{label}" for label in call.labels]


def _docstring(
    plan: Plan, program: Program, call: Call, arguments: Sequence[str | Path]
) -> list[str]:
    how = "as it is" if plan.unchanged else f"in {len(plan.stages)} regions"
    lines = [f'"""As {plan.function}, {how}.', "", "Args:"]
    types = [program.types[value] for value in program.arguments[: len(arguments)]]
    kinds = [f"{one.dtype}{list(one.shape)}" for one in types]
    for label in _parameters(call):
        told = Counter(
            (one.pattern() if isinstance(one, Path) else one, kind)
            for one, kind in zip(arguments, kinds, strict=True)
            if (one.root if isinstance(one, Path) else re.sub(r"_\d+$", "", one)) == label
        )
        for (pattern, kind), count in told.items():
            lines.append(f"  {pattern}: {kind}" + (f", {count} times" if count > 1 else ""))
    if program.constants:
        lines.append("  constants: the arrays that the original closed over:")
        lines += [
            f"    {number}. {program.types[value].dtype}{list(program.types[value].shape)}"
            for number, value in enumerate(program.constants)
        ]
    if program.closed_over:
        lines.append("  closed_over: the arrays of the step around it that the original read:")
        lines += [
            f"    {number}. {name and name + ': '}{program.types[value].dtype}"
            f"{list(program.types[value].shape)}"
            for number, (name, value) in enumerate(
                zip(program.closed_over_names, program.arguments[len(arguments) :], strict=True)
            )
        ]
    return [*lines, '"""'] if len(lines) > 3 else [lines[0] + '"""']


def _parameters(call: Call) -> list[str]:
    return [*_positional(call), *sorted(call.kwargs)]


def _arguments(call: Call, distinct: Distinct) -> tuple[list[str], list[str | Path]]:
    """The text of all arrays, and the lines that unpack what code cannot step into."""
    lines: list[str] = []
    found: list[str | Path] = []
    given = [*call.args, *(call.kwargs[name] for name in sorted(call.kwargs))]
    for root, argument in zip(_parameters(call), given, strict=True):
        paths = paths_of(root, argument)
        if paths is None:
            count = len(jax.tree.leaves(argument))
            names = [distinct.name(identifier(root), numbered=True) for _ in range(count)]
            lines += assigned(names, Expression("jax.tree.leaves", (root,)))
            found += names
        else:
            found += paths
    return lines, found


def _constant(value: Any) -> str:
    kind = jax.typeof(value)
    written = constant_text(value, str(kind.dtype), weak=kind.weak_type)
    return written if type(value) in (bool, int, float, complex) else f"jnp.asarray({written})"


def _words_of_results(program: Program) -> dict[int, str]:
    """What to call the results: by the last word of the path to each."""
    tree = jax.tree.unflatten(program.output_tree, range(len(program.outputs)))
    found = {}
    for path, place in jax.tree_util.tree_flatten_with_path(tree)[0]:
        atom = program.outputs[place]
        words = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
        if isinstance(atom, int) and words:
            found[atom] = identifier(words[-1])
        elif isinstance(atom, int) and place < program.loss_outputs:
            found[atom] = "loss"
    return found


def _tree_text(tree: Any, leaves: Sequence[str]) -> str:
    """A tree with these texts as leaves, as an expression.

    Raises:
      UnprintableError: a node has a user-defined type.
    """

    def among(first: str, parts: Sequence[str], last: str) -> str:
        one_line = (
            f"{first}{', '.join(parts)}{',' if last == ')' and len(parts) == 1 else ''}{last}"
        )
        if len(one_line) <= WIDTH - 3 * len(INDENT) and "\n" not in one_line:
            return one_line
        inside = textwrap.indent(",\n".join(parts), INDENT)
        return f"{first}\n{inside},\n{last}"

    def written(node: Any) -> str:
        if isinstance(node, _Leaf):
            return node.text
        if node is None:
            return "None"
        if type(node) is dict:
            return among("{", [f"{_key(key)}: {written(one)}" for key, one in node.items()], "}")
        if type(node) is list:
            return among("[", [*map(written, node)], "]")
        if type(node) is tuple:
            return among("(", [*map(written, node)], ")")
        raise UnprintableError(
            f"it holds a {type(node).__name__}. Return dictionaries, lists and tuples"
        )

    return written(jax.tree.unflatten(tree, [_Leaf(text=text) for text in leaves]))


def _key(key: Any) -> str:
    return quoted(key) if isinstance(key, str) else repr(key)


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaf:
    text: str


#: How code may differ from the function it stands for: how calls are grouped, what is kept.
_GROUPING = frozenset(
    "checkpoint remat2 remat name optimization_barrier custom_jvp_call jit pjit closed_call "
    "core_call copy copy_p clamp convert_element_type".split()
)


def _check(source: Source, program: Program, call: Call, but: Set[str]) -> None:
    """Raises RematError unless the code has the program's equations, but for some, and results."""
    leaves = jax.tree.leaves((call.args, call.kwargs))
    kinds = [
        leaf if isinstance(leaf, jax.ShapeDtypeStruct) else internals.type_of(leaf)
        for leaf in leaves
    ]
    run = source.load()
    tree = jax.tree.structure((call.args, call.kwargs))

    def flat(*given: Any) -> Any:
        positional, keywords = jax.tree.unflatten(tree, given[: len(leaves)])
        if program.closed_over:
            keywords["closed_over"] = given[len(leaves) :]
        return run(*positional, **keywords)

    closed, shapes = internals.make_jaxpr(
        flat, *kinds, *map(internals.type_of, program.closed_over)
    )
    found = _counted(closed)
    wanted: Counter[str] = Counter()
    for equation in program.equations:
        wanted.update(_of_one(equation.jax_equation))
    missing = [name for name, count in sorted((wanted - found).items()) if name not in but]
    outputs = [array_type(shape) for shape in jax.tree.leaves(shapes)]
    expected = [
        array_type(jax.typeof(atom.value)) if not isinstance(atom, int) else program.types[atom]
        for atom in program.outputs
    ]
    if missing or outputs != expected or jax.tree.structure(shapes) != program.output_tree:
        raise RematError(
            f"The code of {program.name!r} does not do what the function does: it lacks "
            f"{', '.join(missing) or 'nothing, but its results differ'}. This is a fault of "
            "remat_opt: please report it with the function."
        )


def _counted(closed: Any) -> Counter[str]:
    found: Counter[str] = Counter()
    for equation in internals.parts(closed)[3]:
        found.update(_of_one(equation))
    return found


def _of_one(equation: Any) -> Counter[str]:
    found: Counter[str] = Counter()
    inner = list(internals.inner_jaxprs(equation.params))
    for _, jaxpr in inner:
        found.update(_counted(jaxpr))
    if not inner:
        # Code adds two values as it adds two cotangents.
        found[{"add_any": "add"}.get(equation.primitive.name, equation.primitive.name)] += 1
    return found
