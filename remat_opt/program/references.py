"""What a function refers to besides its arguments: decides whether a trace is still valid.

A trace bakes in what the function reads from elsewhere: what it closes over, global variables,
attributes of its instance. ``jax.jit`` goes by the function's identity and does not see these
change. A decorated function must give what the function itself gives, so its traces are stored with
what was found here, and used only as long as that is the same.

The walk goes through functions, classes, instances and containers as far as code that is not
installed can reach: installed packages are assumed not to change. JAX arrays, which are immutable,
and functions' code objects are compared by identity, numbers and texts by value. What may change
unseen has no references: a tracer, a mutable array, an iterator, a C object.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import inspect
import os
import re
import sys
import sysconfig
import types
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

#: How many things are looked at; a function that refers to more is traced at every call.
_MOST = 20_000
#: Larger NumPy arrays are not compared.
_MOST_BYTES = 65_536
#: The flag of a heap type: a class made by Python code.
_HEAP_TYPE = 1 << 9

_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD = os.path.normpath(sysconfig.get_paths()["stdlib"]) + os.sep

_VALUES: tuple[Any, ...] = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(Ellipsis),
    range,
    slice,
)
_CONSTANT_KINDS = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.GenericAlias,
    enum.Enum,
    inspect.Signature,
    re.Pattern,
    np.dtype,
    np.ufunc,
)
#: Attributes that describe a class rather than belong to it.
_ABOUT_CLASSES = frozenset(
    "__dict__ __weakref__ __doc__ __module__ __annotations__ __dataclass_fields__ "
    "__dataclass_params__ __match_args__ __slots__ __abstractmethods__ _abc_impl __orig_bases__ "
    "__parameters__ __qualname__ __firstlineno__ __static_attributes__ __annotate__ "
    "__annotations_cache__ __annotate_func__ __signature__ __type_params__ __subclasshook__".split()
)


class _UnseenError(Exception):
    """Something was reached that may change unseen."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """A thing that equals only itself."""

    thing: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """What a function was found to refer to; equal as long as all of it stays the same.

    Attributes:
      found: in the order of the walk.
      arrays: those that were found.
    """

    found: tuple[Any, ...]
    arrays: tuple[Any, ...] = dataclasses.field(compare=False)

    def cover(self, arrays: Iterable[Any]) -> bool:
        """Whether these arrays are all among those that were found."""
        return {id(array) for array in arrays} <= {id(array) for array in self.arrays}


def references(fn: object) -> References | None:
    """What a function refers to, or None if that could change unseen.

    Example:
      >>> scale = [2.0]
      >>> def double(x):
      ...     return scale[0] * x
      >>> before = references(double)
      >>> before == references(double)
      True
      >>> scale[0] = 3.0
      >>> before == references(double)
      False
      >>> references(iter([1]).__next__) is None  # an iterator changes unseen
      True
    """
    walk = _Walk()
    try:
        walk.see(fn)
        walk.see_modules()
    except (_UnseenError, RecursionError):
        return None
    things = (thing for _, thing in walk.seen.values())
    arrays = tuple(thing for thing in things if isinstance(thing, jax.Array | np.ndarray))
    return References(found=tuple(walk.found), arrays=arrays)


class _Walk:
    def __init__(self) -> None:
        self.found: list[Any] = []
        # By identity, in order; holding the things themselves, so that no identity is reused.
        self.seen: dict[int, tuple[int, Any]] = {}
        # Modules that are not installed, and the attributes that code reads, of whatever it is.
        self._modules: list[types.ModuleType] = []
        self._attributes: set[str] = set()

    def see(self, thing: Any) -> None:
        kind = type(thing)
        if kind in _VALUES:
            self.found.append((kind, thing))
            return
        if id(thing) in self.seen:
            self.found.append(("again", self.seen[id(thing)][0]))
            return
        self.seen[id(thing)] = len(self.seen), thing
        if len(self.seen) > _MOST:
            raise _UnseenError
        if isinstance(thing, jax.core.Tracer | jax.Ref):
            raise _UnseenError
        if isinstance(thing, np.ndarray | np.generic):
            self._see_numpy(thing)
            return
        if kind in (tuple, list, dict, set, frozenset) or isinstance(thing, tuple):
            self._see_container(thing)
            return
        if isinstance(thing, (jax.Array, types.CodeType, types.ModuleType, *_CONSTANT_KINDS)):
            self.found.append(_Same(thing))
            if isinstance(thing, types.ModuleType) and not _is_installed(
                getattr(thing, "__file__", None)
            ):
                self._modules.append(thing)
            return
        self.found.append(kind)
        if isinstance(thing, types.BuiltinFunctionType | types.MethodWrapperType):
            self._see_built_in(thing)
        else:
            self._see_parts(thing)

    def _see_built_in(self, thing: Any) -> None:
        """A C function, which may be bound: ``random.random`` is bound to a generator."""
        self.found.append(thing.__name__)
        owner = thing.__self__
        if isinstance(owner, types.ModuleType | type) or owner is None:
            self.found.append(_Same(thing))
        else:
            self.see(owner)

    def _see_numpy(self, thing: Any) -> None:
        if thing.nbytes > _MOST_BYTES or thing.dtype.hasobject:
            raise _UnseenError
        self.found.append((type(thing), str(thing.dtype), thing.shape, thing.tobytes()))

    def _see_container(self, thing: Any) -> None:
        self.found.append((type(thing), len(thing)))
        if isinstance(thing, set | frozenset):
            if not all(type(one) in _VALUES for one in thing):
                raise _UnseenError
            self.found.append(frozenset(thing))
            return
        parts = thing.items() if isinstance(thing, dict) else thing
        for part in parts:
            if isinstance(thing, dict):
                self.see(part[0])
                part = part[1]
            self.see(part)

    def _see_parts(self, thing: Any) -> None:
        if isinstance(thing, types.FunctionType):
            self._see_function(thing)
        elif isinstance(thing, types.MethodType):
            self.see(thing.__self__)
            self.see(thing.__func__)
        elif isinstance(thing, functools.partial):
            self.see((thing.func, thing.args, thing.keywords))
        elif isinstance(thing, staticmethod | classmethod):
            self.see(thing.__func__)
        elif isinstance(thing, property):
            self.see((thing.fget, thing.fset, thing.fdel))
        elif isinstance(thing, type):
            self._see_class(thing)
        elif _is_installed(_file_of(type(thing))) and hasattr(thing, "__wrapped__"):
            # Under jax.jit and the like, or decorated by this package.
            rules = (getattr(thing, rule, None) for rule in ("jvp", "fwd", "bwd"))
            self.see((thing.__wrapped__, *rules))
        else:
            self._see_instance(thing)

    def _see_function(self, fn: types.FunctionType) -> None:
        self.see((fn.__code__, fn.__defaults__, fn.__kwdefaults__))
        for cell in fn.__closure__ or ():
            try:
                contents = cell.cell_contents
            except ValueError:
                self.found.append("empty")
            else:
                self.see(contents)
        for name, value in sorted(vars(fn).items()):
            self.found.append(name)
            self.see(value)
        if not _is_installed(fn.__code__.co_filename):
            self._see_globals(fn)

    def _see_globals(self, fn: types.FunctionType) -> None:
        names = _names(fn.__code__)
        for name in names.globals:
            if name in fn.__globals__:  # else built in, or missing
                self.found.append(name)
                self.see(fn.__globals__[name])
        self._attributes.update(names.attributes)
        package = fn.__globals__.get("__package__") or ""
        for name in names.imported:
            for full in (name, f"{package}.{name}".strip(".")):
                if full in sys.modules:
                    self.see(sys.modules[full])

    def see_modules(self) -> None:
        """Of modules that are not installed what code reads of anything by that name."""
        seen: set[tuple[int, str]] = set()
        while new := [
            (module, name)
            for module in self._modules
            for name in sorted(self._attributes.intersection(vars(module)))
            if (id(module), name) not in seen
        ]:
            for module, name in new:
                seen.add((id(module), name))
                self.found.append(name)
                self.see(vars(module)[name])

    def _see_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if _is_installed(_file_of(base)):
                self.found.append(_Same(base))
                continue
            for name, value in vars(base).items():
                if name not in _ABOUT_CLASSES:
                    self.found.append(name)
                    self.see(value)

    def _see_instance(self, thing: Any) -> None:
        kind = type(thing)
        if not all(map(_is_by_python, kind.__mro__)) or not hasattr(thing, "__dict__"):
            raise _UnseenError
        self.see(kind)
        self._see_attributes(thing)
        for base in kind.__mro__:
            for slot in _slots(base):
                if slot != "__dict__" and hasattr(thing, slot):
                    self.found.append(slot)
                    self.see(getattr(thing, slot))

    def _see_attributes(self, thing: Any) -> None:
        for name, value in vars(thing).items():
            self.found.append(name)
            self.see(value)


def _is_by_python(cls: type) -> bool:
    """Whether a class is made by Python code, so that its instances hide nothing."""
    if cls is object:
        return True
    # C code has heap types too, as in ``_random``: their modules are not Python files.
    return bool(cls.__flags__ & _HEAP_TYPE) and (_file_of(cls) or "").endswith((".py", "<main>"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """What code reads by name, its inner functions included, in alphabetical order.

    Attributes:
      globals: global variables.
      attributes: attributes, of anything.
      imported: modules that it imports as it runs; empty for its own package.
    """

    globals: tuple[str, ...]
    attributes: tuple[str, ...]
    imported: tuple[str, ...]


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> _Names:
    names, attributes, imported = set[str](), set[str](), set[str]()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            imported.add(instruction.argval)
            attributes.update(instruction.argval.split("."))
        elif isinstance(instruction.argval, str):
            attributes.add(instruction.argval)
        elif isinstance(instruction.argval, types.CodeType):
            inner = _names(instruction.argval)
            names.update(inner.globals)
            attributes.update(inner.attributes)
            imported.update(inner.imported)
    return _Names(
        globals=tuple(sorted(names)),
        attributes=tuple(sorted(attributes)),
        imported=tuple(sorted(imported)),
    )


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    own = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in own if name != "__weakref__")


def _file_of(cls: type) -> str | None:
    module = sys.modules.get(cls.__module__)
    if module is None or cls.__module__ == "__main__":
        return "<main>"
    return getattr(module, "__file__", None)


@functools.cache
def _is_installed(file: str | None) -> bool:
    """Whether a file belongs to an installed package, to Python, or to this package."""
    if file is None:  # built in
        return True
    path = os.path.normpath(file)
    inside = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
    return (
        any(part in path for part in inside)
        or path.startswith((_OWN_FOLDER, _STANDARD))
        or file.startswith("<frozen")
    )
