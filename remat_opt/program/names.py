"""What to call the values of a program.

People know the modules of their network, the functions they called and their own lines, but not the
primitives that result. So a value is named after the call it results from (``clip``, ``relu``),
after the module whose output it is or works on, and after the argument it is multiplied with. If
none of these is known, the primitive is put in words.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import jax

from remat_opt import _jax_internals as internals
from remat_opt.naming import ValueName, in_words, modules_of
from remat_opt.program.record import Equation, Program

#: Primitives named after the module they are in or the argument they read, not as an output.
_PRODUCTS = frozenset({"conv_general_dilated", "dot_general"})
#: Primitives that pass on their operand in another form: look behind them for its maker.
_FORMS = frozenset(
    "broadcast_in_dim convert_element_type copy name reshape squeeze transpose".split()
)
#: How many of those to look behind.
_MOST_FORMS = 4
#: How many components of a module's path identify it.
_PATH = 2
#: Found only in the names of JAX's own scopes: ``jnp.einsum`` opens one named ``ij,jk->ik``.
_NOT_IN_MODULES = "->"


class Names:
    """The names of a program's values."""

    def __init__(self, program: Program, arguments: Mapping[int, str] | None = None) -> None:
        """Prepares to name any number of values.

        Args:
          program: a traced function.
          arguments: the names of its arguments; None for the names in the user's code.
        """
        self._program = program
        self._makers = program.makers()
        self._readers: dict[int, list[int]] = defaultdict(list)
        for index, equation in enumerate(program.equations):
            for value in equation.value_inputs:
                self._readers[value].append(index)
        self._outputs = frozenset(program.output_values)
        self._arguments = _argument_names(program) if arguments is None else arguments
        self._modules = tuple(_module(equation.module) for equation in program.equations)

    def inside(self, equation: Equation, body: Program) -> Names:
        """The names of values in a loop or branch, whose arguments are named by what it receives.

        Args:
          equation: the ``scan`` or ``cond`` of this program.
          body: its body or branch, as a program.
        """
        # A branch's inputs follow the number of the branch.
        given = equation.inputs[len(equation.inputs) - len(body.arguments) :]
        found = {}
        for value, one in zip(body.arguments, given, strict=True):
            name = self._arguments.get(self._behind(one)) if isinstance(one, int) else None
            if name is not None:
                found[value] = name
        return Names(body, found)

    def of(self, index: int) -> ValueName:
        """The name of the first value that the equation at a position makes."""
        equation = self._program.equations[index]
        source = internals.source_line(equation.jax_equation, equation.calls)
        kind = self._program.types[equation.outputs[0]] if equation.outputs else None
        return ValueName(
            what=self._what(equation, self._modules[index], source),
            module=self._modules[index],
            source=source,
            shape=kind.shape if kind is not None else (),
            dtype=kind.dtype if kind is not None else "",
            primitive=equation.operation.primitive,
        )

    def _what(self, equation: Equation, module: str, source: str) -> str:
        said = _operation(equation, self._program.name)
        is_product = equation.operation.primitive in _PRODUCTS
        if module:
            inner = self._operand_module(equation, module)
            if inner is not None:
                return f"{said} of {_short(inner)}"
            if not is_product and "/" in module and self._leaves(equation, module):
                return f"output of {_short(module)}"
            return f"{said} in {_short(module)}"
        if is_product:
            read = (self._arguments.get(self._behind(value)) for value in equation.value_inputs)
            named = next(filter(None, reversed(list(read))), None)
            if named is not None:
                return f"{said} with {named}"
        function = _function(source)
        if function and function != "<lambda>" and " in " not in said:
            return f"{said} in {function}"
        return said

    def _behind(self, value: int) -> int:
        """The value of which this one is another form."""
        for _ in range(_MOST_FORMS):
            maker = self._makers.get(value)
            if maker is None:
                break
            equation = self._program.equations[maker]
            if equation.operation.primitive not in _FORMS or len(equation.value_inputs) != 1:
                break
            (value,) = equation.value_inputs
        return value

    def _operand_module(self, equation: Equation, own: str) -> str | None:
        """The module inside the equation's own whose output it works on."""
        for value in equation.value_inputs:
            maker = self._makers.get(self._behind(value))
            if maker is not None and self._modules[maker].startswith(own + "/"):
                return self._modules[maker]
        return None

    def _leaves(self, equation: Equation, own: str) -> bool:
        """Whether a value of the equation is read outside its module, or is a result."""
        return any(
            value in self._outputs
            or any(
                module != own and not module.startswith(own + "/")
                for module in self._readers_modules(value)
            )
            for value in equation.outputs
        )

    def _readers_modules(self, value: int) -> Iterator[str]:
        return (self._modules[index] for index in self._readers[value])


def _operation(equation: Equation, function: str) -> str:
    """The outermost call that results in the equation's value, or what it does, in words."""
    primitive = equation.operation.primitive
    said = internals.custom_name(equation.jax_equation) or in_words(primitive)
    variables = list(equation.jax_equation.outvars)
    for call in equation.calls:
        name = str(call.params.get("name", "")).lstrip("_")
        if not name or name in ("<lambda>", function):
            return said
        results = internals.results_of_call(call, variables)
        if not results:
            return f"{said} in {name}"
        said, variables = name, results
    return said


def _module(name_stack: str) -> str:
    """The path of a module, without scopes that JAX opens by itself."""
    return "/".join(one for one in modules_of(name_stack) if _NOT_IN_MODULES not in one)


def _function(source: str) -> str:
    """The function that a line is in; for a method such as ``__call__``, its class."""
    *outer, function = source.partition(" (")[2].removesuffix(")").split(".")
    is_special = function.startswith("__") and function.endswith("__")
    return outer[-1] if is_special and outer else function


def _short(module: str) -> str:
    return "/".join(module.split("/")[-_PATH:])


def _argument_names(program: Program) -> dict[int, str]:
    """What the user's code calls the arguments: parameter and path."""
    if program.input_tree is None:
        return {}
    given = len(program.arguments) - len(program.closed_over)
    tree = jax.tree.unflatten(program.input_tree, list(program.arguments[:given]))
    found = {
        value: name or f"closed over[{place}]"
        for place, (value, name) in enumerate(
            zip(program.arguments[given:], program.closed_over_names, strict=True)
        )
    }
    for path, number in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not isinstance(number, int) or len(path) < 2:
            continue
        group, key, *rest = path
        if group.idx == 1:
            name = str(key.key)
        elif key.idx < len(program.argument_labels):
            label = program.argument_labels[key.idx]
            name = label if isinstance(label, str) else f"args[{label}]"
        else:
            name = f"args[{key.idx}]"
        found[number] = name + jax.tree_util.keystr(tuple(rest))
    return found
