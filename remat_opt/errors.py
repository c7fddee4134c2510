"""What can go wrong, one class for each thing a caller may want to handle differently.

Every class derives from :class:`RematError`, so that one ``except`` catches all of them. Those that
mean "this value is not acceptable" are also :class:`ValueError`, as Python programmers expect.
"""

from __future__ import annotations

from collections.abc import Sequence

#: The command that installs an extra's packages. GPU and TPU compilers are gigabytes, so neither is
#: a plain dependency.
_INSTALL_COMMAND = "pip install 'remat_opt[{extra}]'"


class RematError(Exception):
    """Base class of every error this package raises on purpose."""


class UnitError(RematError, ValueError):
    """A string that should be an amount of bytes, but cannot be read as one."""


class BudgetError(RematError, ValueError):
    """No plan fits the budget.

    Attributes:
      least_peak_bytes: the lowest peak of temporary bytes that any plan reaches.
      budget_bytes: the budget that was asked for.
      pinning: the values that keep the peak from going lower, as (label, bytes), largest
        first; empty if unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        least_peak_bytes: int,
        budget_bytes: int,
        pinning: Sequence[tuple[str, int]] = (),
    ) -> None:
        super().__init__(message)
        self.least_peak_bytes = least_peak_bytes
        self.budget_bytes = budget_bytes
        self.pinning = tuple((label, size) for label, size in pinning)


class CallError(RematError, TypeError):
    """A call with an option or argument that nothing takes, or without one that is needed."""


class TraceError(RematError):
    """The function could not be traced, or contains something that cannot be planned."""


class RewriteError(TraceError):
    """A rewritten program is not what was planned: a bug in this package."""


class PlanningWarning(UserWarning):
    """A function could not be planned because of a bug in this package, and runs unchanged."""


class GraphError(RematError, ValueError):
    """A graph that breaks its own rules: a cycle, a missing vertex, negative bytes."""


class PlanFileError(RematError, ValueError):
    """A saved plan that is truncated, edited, of another version or of another program."""


class DeviceError(RematError, ValueError):
    """A device that is unknown, not attached, or wrongly described."""


class MissingPackageError(RematError, ImportError):
    """A package that this request needs is not installed.

    Attributes:
      package: the missing package, as ``import`` or ``pip`` names it.
      extra: the extra of ``remat_opt`` that installs it, such as ``tpu`` or ``cuda``; "" if
        there is none and the package is installed under its own name.
    """

    def __init__(self, purpose: str, *, package: str, extra: str = "") -> None:
        command = _INSTALL_COMMAND.format(extra=extra) if extra else f"pip install {package}"
        super().__init__(
            f"{purpose} needs the package {package}, which is not installed. "
            f"Install it with: {command}"
        )
        self.package = package
        self.extra = extra


class CompileError(RematError):
    """The compiler refused the program.

    Attributes:
      device: name of the device compiled for.
      needed_bytes: device memory that the compiler says is needed (by the whole program or its
        temporaries, as it says), or None if it gave no figure.
      available_bytes: device memory the compiler says there is, or None likewise.
      compiler_message: what the compiler said, in full.
      memory: what would have been alive when (``measurement.buffers.CompiledMemory``), if that was
        requested and the compiler decided it before refusing; else None.
    """

    def __init__(
        self,
        message: str,
        *,
        device: str,
        needed_bytes: int | None = None,
        available_bytes: int | None = None,
        compiler_message: str = "",
    ) -> None:
        super().__init__(message)
        self.device = device
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.compiler_message = compiler_message
        self.memory: object | None = None
