"""``python -m remat_opt``: plans, what memory is spent on, and checks, from a shell.

A loss function and its arguments are named as ``MODULE:FUNCTION``. The current directory is
importable, as for ``python -m``. An expected failure (``RematError``) is one line on stderr and
exit status 2, as for a wrong option; a fault in the named modules keeps its traceback. ``check``
and ``lint`` exit with 1 if they find something.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat_opt import api, explanation, solvers, testing
from remat_opt import device as device_table
from remat_opt.device import Device
from remat_opt.errors import RematError
from remat_opt.linting.report import lint
from remat_opt.units import format_bytes
from remat_opt.view import page, report

_EXAMPLE = """\
example: given train.py with

    def loss(params, batch): ...
    def example_args():
        return params, batch      # arrays or jax.ShapeDtypeStruct, in any tree

    python -m remat_opt compare train:loss --args train:example_args --device h200 --budget 0.5
    python -m remat_opt plan train:loss --args train:example_args --budget 6GiB --save plan.json
"""


#: Keyword arguments that ``make_plan`` and ``compare`` take for themselves.
_OPTIONS = frozenset(inspect.signature(api.make_plan).parameters) | frozenset(
    inspect.signature(api.compare).parameters
)


class CommandError(RematError):
    """A command that cannot be carried out as written."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      arguments: the command line without the program's name; ``sys.argv`` if None.

    Returns:
      The exit status: 0; 1 if a check found something; 2 if the command could not be carried out.
    """
    options = _parser().parse_args(arguments)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    run: Callable[[argparse.Namespace], int | None] = options.run
    try:
        return run(options) or 0
    except RematError as error:
        print("remat_opt: " + " ".join(str(error).split()), file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m remat_opt",
        description="Plan rematerialisation of JAX programs: plan, compare, explain, lint, check.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    compare = _command(
        commands, "compare", _compare, "compile plans beside jax.checkpoint's own policies"
    )
    _add_function(compare)
    _add_planning(compare)
    compare.add_argument(
        "--budget",
        action="append",
        default=[],
        metavar="BYTES|SHARE",
        help="as for plan; may be given several times",
    )
    compare.add_argument(
        "--max-overhead",
        action="append",
        default=[],
        type=float,
        metavar="SHARE",
        help="as for plan; may be given several times",
    )
    compare.add_argument(
        "--policies",
        metavar="NAME,...",
        help="names from jax.checkpoint_policies, or 'none' (default: all)",
    )
    _add_donated(compare)
    _add_output(compare, "one JSON object per row")
    plan = _command(commands, "plan", _plan, "decide what to keep and what to recompute")
    _add_function(plan)
    _add_planning(plan)
    plan.add_argument(
        "--budget",
        metavar="BYTES|SHARE",
        help="limit on temporaries: 6GiB; 0.4 for that share of what the unchanged function "
        "needs; or fit for the device's memory less arguments and outputs",
    )
    plan.add_argument(
        "--reserve", metavar="BYTES", help="memory that fit leaves free, such as 2GiB"
    )
    plan.add_argument(
        "--max-overhead",
        type=float,
        metavar="SHARE",
        help="least memory with at most this share of a forward pass recomputed, such as 0.05",
    )
    plan.add_argument(
        "--verify",
        nargs="?",
        const=True,
        default=False,
        choices=(True, "compile"),
        metavar="compile",
        help="compile the planned gradient and show its figures; with 'compile', compile several "
        "plans and keep the best as compiled",
    )
    _add_donated(plan)
    plan.add_argument("--save", metavar="FILE", help="write the plan, for optimal_remat(plan=FILE)")
    _add_output(plan, "the plan as --save writes it")
    frontier = _command(commands, "frontier", _frontier, "show the best plans over all budgets")
    _add_function(frontier)
    _add_planning(frontier)
    _add_donated(frontier)
    _add_output(frontier, "one JSON object per plan")
    explain = _command(
        commands, "explain", _explain, "show what a training step's memory is spent on"
    )
    _add_function(explain, "a training step, or a decorated loss")
    _add_device(explain)
    _add_donated(explain)
    _add_output(explain, "the explanation as one JSON object")
    linted = _command(commands, "lint", _lint, "find hand-written checkpoints of little use")
    _add_function(linted, "a loss function")
    linted.add_argument("--json", action="store_true", help="for machines: one JSON object")
    check = _command(
        commands, "check", _check, "fail if a plan's peak has grown or its program has changed"
    )
    check.add_argument("plan", metavar="FILE", help="a plan that was saved with --verify")
    _add_function(check, "what the plan was made for")
    _add_device(check, None, "the plan's")
    _add_derivative(check)
    _add_donated(check)
    check.add_argument(
        "--tolerance",
        type=float,
        default=testing.TOLERANCE,
        metavar="SHARE",
        help="by what share temporaries may grow (default: %(default)s)",
    )
    check.add_argument("--json", action="store_true", help="for machines: one JSON object")
    devices = _command(commands, "devices", _devices, "list the devices you can plan for")
    _add_output(devices, "one JSON object per device")
    listed = _command(commands, "solvers", _solvers, "list the solvers")
    _add_output(listed, "one JSON object per solver")
    return parser


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int | None], purpose: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=purpose,
        description=purpose[0].upper() + purpose[1:] + ".",
        epilog=None if name in ("devices", "solvers") else _EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    return command


def _add_function(
    command: argparse.ArgumentParser,
    what: str = "the loss function, or a training step that differentiates a decorated one",
) -> None:
    command.add_argument("function", metavar="MODULE:FUNCTION", help=what)
    command.add_argument(
        "--args",
        required=True,
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns the tuple of positional arguments: "
        "arrays, or jax.ShapeDtypeStruct in place of arrays",
    )
    command.add_argument(
        "--kwargs",
        metavar="MODULE:FUNCTION",
        help="a function that returns the dictionary of keyword arguments",
    )


def _add_device(
    command: argparse.ArgumentParser, default: str | None = "attached", said: str = "attached"
) -> None:
    command.add_argument(
        "--device", default=default, help=f"a name that 'devices' lists (default: {said})"
    )


def _add_planning(command: argparse.ArgumentParser) -> None:
    _add_device(command)
    command.add_argument(
        "--solver",
        default="portfolio",
        metavar="NAME",
        help="a name that 'solvers' lists (default: portfolio)",
    )
    command.add_argument(
        "--overhead",
        choices=("seconds", "flops"),
        default="seconds",
        help="unit in which recomputation is counted (default: seconds)",
    )
    _add_derivative(command)


def _add_derivative(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--argnums",
        type=_numbers,
        default=0,
        metavar="N,...",
        help="positions of the arguments to differentiate (default: 0)",
    )
    command.add_argument(
        "--existing",
        choices=("keep", "replace"),
        default="keep",
        help="whether the plan also decides what is under the function's own checkpoints "
        "(default: keep)",
    )
    command.add_argument(
        "--collectives",
        choices=("keep", "recompute"),
        default="keep",
        help="whether the plan may run again what communicates with other devices (default: keep)",
    )
    command.add_argument(
        "--has-aux", action="store_true", help="the function returns (loss, auxiliary)"
    )


def _add_donated(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--donate-argnums",
        type=_numbers,
        metavar="N,...",
        help="of a step: positions of the arguments it donates (default: what its jax.jit says)",
    )


def _add_output(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument("--json", action="store_true", help=f"for machines: {what}")
    if not what.endswith(("device", "solver")):
        command.add_argument("--html", metavar="FILE", help="write a page with pictures")


def _numbers(text: str) -> int | tuple[int, ...]:
    try:
        numbers = tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give positions such as 0 or 0,2") from None
    return numbers if "," in text else numbers[0]


def _budget(text: str) -> str | float:
    """A budget as the API takes it: a number with a point and no unit is a share."""
    if "." not in text:
        return text
    try:
        return float(text)
    except ValueError:
        return text


def _compare(options: argparse.Namespace) -> None:
    fn, args, kwargs = _called(options)
    policies = None
    if options.policies is not None:
        policies = [] if options.policies == "none" else options.policies.split(",")
    found = api.compare(
        fn,
        *args,
        budgets=[_budget(text) for text in options.budget],
        max_overheads=options.max_overhead,
        policies=policies,
        donate_argnums=options.donate_argnums,
        **_common(options),
        **kwargs,
    )
    if options.json:
        for row in found.rows:
            heading = {"function": found.function, "device": found.device}
            print(json.dumps({**heading, **row}))
    else:
        print(found)
    if options.html:
        _write(options.html, page.document(f"{found.function}: comparison", found._repr_html_()))


def _plan(options: argparse.Namespace) -> None:
    fn, args, kwargs = _called(options)
    plan = api.make_plan(
        fn,
        *args,
        budget=None if options.budget is None else _budget(options.budget),
        max_overhead=options.max_overhead,
        reserve=options.reserve,
        verify=options.verify,
        donate_argnums=options.donate_argnums,
        **_common(options),
        **kwargs,
    )
    print(plan.to_json() if options.json else plan)
    if options.save:
        try:
            plan.save(options.save)
        except OSError as error:
            raise CommandError(f"{options.save!r} cannot be written: {error.strerror}.") from None
    if options.html:
        _write(options.html, plan.to_page())


def _frontier(options: argparse.Namespace) -> None:
    fn, args, kwargs = _called(options)
    found = api.frontier(
        fn, *args, donate_argnums=options.donate_argnums, **_common(options), **kwargs
    )
    if options.json:
        for row in found.rows:
            heading = {"function": found.function, "device": found.device}
            print(json.dumps({**heading, **row}))
    else:
        print(found)
    if options.html:
        _write(options.html, page.document(f"{found.function}: frontier", found._repr_html_()))


def _explain(options: argparse.Namespace) -> None:
    fn, args, kwargs = _called(options)
    found = explanation.explain(
        fn, *args, device=options.device, donate_argnums=options.donate_argnums, **kwargs
    )
    print(found.to_json() if options.json else found)
    if options.html:
        _write(options.html, page.document(f"{found.function}: memory", found._repr_html_()))


def _lint(options: argparse.Namespace) -> int:
    fn, args, kwargs = _called(options)
    found = lint(fn, *args, **kwargs)
    print(found.to_json() if options.json else found)
    return 1 if found else 0


def _check(options: argparse.Namespace) -> int:
    fn, args, kwargs = _called(options)
    found = testing.verdict(
        options.plan,
        fn,
        args,
        kwargs,
        tolerance=options.tolerance,
        argnums=options.argnums,
        has_aux=options.has_aux,
        donate_argnums=options.donate_argnums,
        device=options.device,
    )
    if options.json:
        print(json.dumps(dataclasses.asdict(found)))
    elif found.complaint:
        print(found.complaint, file=sys.stderr)
    else:
        now = format_bytes(found.now_bytes or 0)
        then = format_bytes(found.then_bytes)
        print(f"The plan of {found.function} holds on {found.device}: {now}, {then} when made.")
    return 1 if found.complaint else 0


def _devices(options: argparse.Namespace) -> None:
    devices = [device_table.get_device(name) for name in device_table.available()]
    if options.json:
        for device in devices:
            print(json.dumps(_device_row(device)))
        return
    table = report.Table(
        title="Devices (--device; 'attached' is what JAX shows here)",
        headings=("name", "", "memory", "bandwidth", "bfloat16", "float32"),
        rows=tuple(
            (
                device.name,
                device.title,
                format_bytes(device.memory_bytes),
                f"{device.memory_bandwidth / 1e9:,.0f} GB/s",
                f"{device.flops_rate('bfloat16') / 1e12:,.1f} TFLOP/s",
                f"{device.flops_rate('float32') / 1e12:,.1f} TFLOP/s",
            )
            for device in devices
        ),
        align="llrrrr",
    )
    print(table.text(report.columns()))


def _solvers(options: argparse.Namespace) -> None:
    found = solvers.available()
    if options.json:
        for row in found:
            print(json.dumps(dataclasses.asdict(row)))
    else:
        print(found)


def _device_row(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "title": device.title,
        "platform": device.platform,
        "memory_bytes": device.memory_bytes,
        "memory_bytes_per_second": device.memory_bandwidth,
        "host_bytes_per_second": device.host_bandwidth,
        "flops_per_second": dict(device.flops_per_second),
        "source": device.source,
    }


def _common(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "device": options.device,
        "solver": options.solver,
        "overhead": options.overhead,
        "argnums": options.argnums,
        "has_aux": options.has_aux,
        "existing": options.existing,
        "collectives": options.collectives,
    }


def _called(options: argparse.Namespace) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    """The loss function with its positional and keyword arguments."""
    fn = load(options.function)
    args = load(options.args)()
    if not isinstance(args, tuple):
        raise CommandError(
            f"--args {options.args} returned a {type(args).__name__}: return the tuple of the "
            "loss function's arguments; for a single one, (argument,)."
        )
    kwargs = load(options.kwargs)() if options.kwargs else {}
    if not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        raise CommandError(
            f"--kwargs {options.kwargs} returned a {type(kwargs).__name__}: return a dictionary "
            "from names of arguments to arguments."
        )
    taken = sorted(set(kwargs) & _OPTIONS)
    if taken:
        raise CommandError(
            f"--kwargs {options.kwargs} has {taken[0]!r}, which is also an option of "
            "remat_opt: wrap the loss in a function that names the argument differently."
        )
    return fn, args, kwargs


def load(name: str) -> Callable[..., Any]:
    """The function that ``MODULE:FUNCTION`` names; attributes may follow one another.

    Raises:
      CommandError: it names no function.
    """
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise CommandError(
            f"{name!r} is not of the form MODULE:FUNCTION, such as train:loss for the "
            "function loss in train.py."
        )
    try:
        thing: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if not (module_name == missing or module_name.startswith(missing + ".")):
            raise  # The module was found; something that it imports was not.
        raise CommandError(
            f"There is no module {missing!r}, which {name!r} names: give it as in an import "
            f"statement (no .py). Looked in the current directory, {os.getcwd()}, and where "
            "Python finds modules."
        ) from None
    for attribute in path.split("."):
        if not hasattr(thing, attribute):
            raise CommandError(f"{name!r}: {module_name!r} has no {path!r}.")
        thing = getattr(thing, attribute)
    if not callable(thing):
        raise CommandError(f"{name!r} is not a function, but of type {type(thing).__name__}.")
    return thing  # type: ignore[no-any-return]  # callable() has checked it


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise CommandError(f"{path!r} cannot be written: {error.strerror}.") from None
