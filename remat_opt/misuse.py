"""What is said about a call that cannot be meant: an option or argument that nothing takes.

Options of the public functions stand beside keyword arguments of the user's function, so Python
alone would blame the user's function for a misspelt option.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from remat_opt.errors import CallError, RematError

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def entry_point(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Makes a public function say what is wrong with a call that cannot be meant.

    The call is only looked at if it has failed: the signature of a function is not always what it
    really takes.
    """

    @functools.wraps(function)
    def checked(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            said = "" if isinstance(error, RematError) else _complaint(function, args, kwargs)
            if not said:
                raise
            raise CallError(said) from error

    return checked


def _complaint(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """What is wrong with a call of a public function; "" if nothing is known."""
    name = function.__name__
    own = inspect.signature(function)
    options = [one.name for one in own.parameters.values() if one.kind is one.KEYWORD_ONLY]
    unknown = [one for one in kwargs if not takes(own, one)]
    if unknown:
        return f"{name} has no option {_advice(unknown[0], options)}"
    if "kwargs" not in own.parameters:
        return ""
    try:
        given = own.bind(*args, **kwargs).arguments
    except TypeError:
        return ""
    fn, its_args, its_kwargs = given["fn"], given.get("args", ()), given.get("kwargs", {})
    if not callable(fn):
        return f"{name} takes a function and its arguments, not a {type(fn).__name__}."
    called = getattr(fn, "__name__", type(fn).__name__)
    try:
        taken = inspect.signature(fn)
    except (TypeError, ValueError):
        return ""
    unknown = [one for one in its_kwargs if not takes(taken, one)]
    if unknown:
        return f"{called!r} has no argument and {name} no option {_advice(unknown[0], options)}"
    try:
        taken.bind(*its_args, **its_kwargs)
    except TypeError as error:
        names = ", ".join(taken.parameters)
        return (
            f"{called!r} cannot be called with these arguments: {error}. After the function, give "
            f"{name} what it takes, ({names}): arrays, or jax.ShapeDtypeStruct in their place."
        )
    return ""


def takes(signature: inspect.Signature, name: str) -> bool:
    """Whether a function has a parameter of this name, or takes keyword arguments of any name."""
    parameters = signature.parameters
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _advice(name: str, options: list[str]) -> str:
    """The end of a message about an unknown option."""
    close = difflib.get_close_matches(name, options, n=1)
    guess = f"Did you mean {close[0]!r}?" if close else "Leave it out."
    return f"{name!r}. {guess} The options are {', '.join(options)}."
