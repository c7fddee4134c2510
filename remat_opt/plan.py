"""The plan: what was decided, what was predicted, what was measured; as data.

A plan names equations by their position in the traced program and carries the program's
fingerprint, so it applies to that program and to no other. In a file it is JSON with a
checksum: data, never code. ``plan_text`` shows it.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import os
import typing
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal

from remat_opt.checksum import checksum_of
from remat_opt.device import Platform
from remat_opt.errors import PlanFileError
from remat_opt.gradients import Gradients
from remat_opt.measurement.compilation import Measurement
from remat_opt.naming import ValueName
from remat_opt.plan_difference import PlanDifference, difference
from remat_opt.schedule import Inside, Stage
from remat_opt.solvers.base import Overhead
from remat_opt.timeline import Resident, Timeline
from remat_opt.view import (
    data_frame,
    page,
    plan_page,
    plan_rows,
    plan_text,
    plan_words,
    plots,
    report,
)

if TYPE_CHECKING:
    from remat_opt.export.source import Source

#: Changes when files of an older version can no longer be read.
FORMAT = "remat_opt plan 12"
#: How deep the JSON of a plan may nest: two levels for each nested region, and a few more. On a
#: chain of 400 equal layers the planner's regions nest 26 deep.
_MOST_DEPTH = 210
#: No amount in a plan is larger: more than any count of FLOPs, less than arithmetic can go wrong
#: on.
_MOST_NUMBER = 10**30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What a plan should achieve.

    By default: the least peak memory for at most one forward pass recomputed.

    Attributes:
      budget_bytes: least overhead with temporaries within this.
      budget_share: the same, as a share of what the unchanged function needs.
      fit: the same, within the device's memory, less arguments, outputs and the reserve.
      reserve_bytes: what ``fit`` leaves free beside them, for optimizer state and the like.
      max_overhead: least peak memory with at most this share of a forward pass recomputed.
      overhead: unit in which recomputation is counted.
      gradients: how the step that the plan is for uses its gradients.
    """

    budget_bytes: int | None = None
    budget_share: float | None = None
    fit: bool = False
    reserve_bytes: int = 0
    max_overhead: float | None = None
    overhead: Overhead = Overhead.SECONDS
    gradients: Gradients = Gradients.CONSUMED


class _Named(abc.ABC):
    """A record about one named value."""

    __slots__ = ()

    name: ValueName

    @property
    def label(self) -> str:
        """Primitive, dtype and shape."""
        return self.name.label

    @property
    def module(self) -> str:
        """Path of the module, such as ``ResNet/block_3/conv``."""
        return self.name.module

    @property
    def source(self) -> str:
        """Line of the user's code, as ``file.py:line (function)``."""
        return self.name.source


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision(_Named):
    """The fate of one vertex.

    Attributes:
      root: position, in the program, of the equation that makes the value.
      name: what to call the value.
      region: number of its region.
      fate: ``kept``, ``recomputed`` or ``not needed`` (by the backward pass).
      times: how often it is computed again; more than once only if regions nest.
      bytes: the value's size, if it takes temporary memory.
      seconds: time to compute it again.
      flops: operations to compute it again.
    """

    root: int
    name: ValueName
    region: int
    fate: str
    times: int
    bytes: int
    seconds: float
    flops: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoopValue(_Named):
    """The fate of one value inside an opened loop, in iterations that run alike, or in a branch.

    Attributes:
      loop: position, in the program, of the equation of the loop or choice; the outermost of nested
        ones.
      part: which iterations or branch, in words.
      name: what to call the value.
      fate: as for ``Decision``.
      handed_on: whether it is what one iteration hands to the next.
      times: how often each iteration computes it again.
      runs: how many iterations of this kind there are; 1 in a branch. If the value is kept, this
        many copies are in memory.
      bytes: the value's size, in one iteration.
      seconds: time to compute it once.
      flops: operations to compute it once.
    """

    loop: int
    part: str
    name: ValueName
    fate: str
    handed_on: bool
    times: int
    runs: int
    bytes: int
    seconds: float
    flops: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pin(_Named):
    """One array alive at the predicted peak.

    Attributes:
      name: what to call the value that it belongs to.
      role: ``kept``, ``forward``, ``recomputed``, ``cotangent``, ``internal`` or ``workspace``.
      bytes: its size.
    """

    name: ValueName
    role: str
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulator says about a plan.

    Attributes:
      temporary_bytes: peak of the temporaries, corrected by what was learnt by compiling, if any.
      model_bytes: the same by the model alone, before anything was learnt.
      plain_temporary_bytes: the same for the unchanged function.
      kept_bytes: total bytes that wait for the backward pass.
      overhead_seconds: time of the recomputation.
      forward_seconds: time of one forward pass.
      recomputed_flops: operations of the recomputation.
      forward_flops: operations of one forward pass.
      timeline: what is alive at the moments of the forward and backward pass.
      plain_timeline: the same for the unchanged function.
      pins: the largest arrays alive at the peak.
    """

    temporary_bytes: int
    model_bytes: int
    plain_temporary_bytes: int
    kept_bytes: int
    overhead_seconds: float
    forward_seconds: float
    recomputed_flops: int
    forward_flops: int
    timeline: Timeline
    plain_timeline: Timeline
    pins: tuple[Pin, ...]

    @property
    def overhead_share(self) -> float:
        """Recomputation time as a share of one forward pass."""
        return self.overhead_seconds / self.forward_seconds if self.forward_seconds else 0.0

    @property
    def recomputed_share(self) -> float:
        """Recomputed FLOPs as a share of one forward pass."""
        return self.recomputed_flops / self.forward_flops if self.forward_flops else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A decided schedule for one program.

    Attributes:
      function: name of the planned function.
      fingerprint: that of the program it belongs to.
      device: name of the device it was planned for.
      platform: that of the device: whose compiler the plan is executed for.
      objective: what was asked for.
      budget_bytes: the budget in bytes, or None if none was given.
      solver: name of the solver.
      communicates_again: whether collectives may run again.
      unchanged: whether the function fits as it is, and so runs as it is.
      stages: the regions in terms of equations, which ``apply_plan`` executes.
      loops: those that are opened, choices among them, and what iterations or branches keep.
      decisions: the fate of every vertex.
      loop_values: likewise for the values inside opened loops.
      predicted: what the simulator says.
      measured: what the compiler says; None until it is asked.
      resident: what the training step that it was made for holds besides its temporaries; None if
        it was made for the loss alone.
      as_compiled: live bytes of temporaries over the steps of the forward and backward pass, as
        compiled: the most in each of evenly spaced stretches. Empty if the compiler was not asked,
        or did not say.
      notes: what a reader of the plan should know.
      remat_opt_version: version that made the plan.
      jax_version: version of JAX that traced the program.
    """

    function: str
    fingerprint: str
    device: str
    platform: Platform
    objective: Objective
    budget_bytes: int | None
    solver: str
    communicates_again: bool
    unchanged: bool
    stages: tuple[Stage, ...]
    loops: tuple[Inside, ...]
    decisions: tuple[Decision, ...]
    loop_values: tuple[LoopValue, ...]
    predicted: Prediction
    measured: Measurement | None
    resident: Resident | None
    as_compiled: tuple[int, ...]
    notes: tuple[str, ...]
    remat_opt_version: str
    jax_version: str

    @property
    def decided(self) -> Hashable:
        """What runs: plans of a program that are equal in it compile to the same."""
        return self.unchanged, self.stages, self.loops

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, fit for JSON."""
        body: dict[str, Any] = _plain(self)
        return body

    def to_json(self) -> str:
        """The plan as the text that ``save`` writes."""
        body = self.to_dict()
        return json.dumps({"format": FORMAT, "checksum": checksum_of(body), "plan": body}, indent=1)

    @classmethod
    def from_json(cls, text: str, *, where: str = "the text") -> Plan:
        """Reads what ``to_json`` wrote.

        Args:
          text: the JSON text.
          where: what to call it in messages.

        Raises:
          PlanFileError: it is truncated, edited, of another format, or no plan at all.
        """
        try:
            data = json.loads(text)
            _check_data(data)
        except (ValueError, RecursionError) as error:
            if isinstance(error, json.JSONDecodeError):
                said = f"it is not JSON, or is cut short ({error})"
            elif isinstance(error, RecursionError):
                said = "it nests too deep"
            else:
                said = f"{error}"
            raise PlanFileError(
                f"{where} is not a plan: {said}. Make the plan again and save it."
            ) from None
        if not isinstance(data, dict) or "format" not in data or "plan" not in data:
            raise PlanFileError(
                f"{where} is JSON, but not a plan of remat_opt: it has no 'format' and 'plan'."
            )
        if data["format"] != FORMAT:
            raise PlanFileError(
                f"{where} has the format {data['format']!r:.60}; this version of remat_opt reads "
                f"{FORMAT!r}. Make the plan again with this version."
            )
        if data.get("checksum") != checksum_of(data["plan"]):
            raise PlanFileError(
                f"{where} was changed after it was saved: its checksum does not match. Make the "
                "plan again rather than edit it."
            )
        try:
            plan = typing.cast(Plan, _rebuild(cls, data["plan"], "plan"))
            _check_regions(plan)
            return plan
        except (TypeError, ValueError, KeyError, RecursionError) as error:
            raise PlanFileError(
                f"{where} does not hold a plan of this version: {error!s:.400}. Make the plan "
                "again."
            ) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file, whole or not at all."""
        target = Path(path)
        draft = target.with_name(target.name + ".part")
        draft.write_text(self.to_json(), encoding="utf-8")
        draft.replace(target)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan from a file.

        Raises:
          PlanFileError: the file is missing, truncated, edited, or no plan.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise PlanFileError(f"There is no plan file {os.fspath(path)!r}.") from None
        except UnicodeDecodeError:
            raise PlanFileError(
                f"{os.fspath(path)!r} is not a plan: it is not a text file."
            ) from None
        except (OSError, ValueError) as error:
            # A folder, a file without read permission, an impossible path.
            reason = error.strerror if isinstance(error, OSError) else error
            raise PlanFileError(
                f"The plan file {os.fspath(path)!r} cannot be read: {reason}."
            ) from None
        return cls.from_json(text, where=repr(os.fspath(path)))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dictionary for each value, in the order of the program.

        ``value``: what it is, in one line; ``what``, ``module``, ``source``, ``shape``, ``dtype``
        and ``primitive``; ``region``; ``fate``; ``times`` that it is computed again; ``bytes``;
        ``seconds`` and ``flops`` of computing it once; ``seconds_per_mib``: what one MiB more would
        save here, or one less would cost, None if there is no choice; ``why``, in words.
        """
        return plan_rows.rows(self.to_dict())

    def to_dataframe(self) -> Any:
        """``rows`` as a DataFrame.

        Raises:
          MissingPackageError: pandas is not installed.
        """
        return data_frame.of(self.rows)

    def show(self, path: str | os.PathLike[str]) -> Path:
        """Writes the plan as a self-contained page, to open in a browser.

        The page loads nothing from the network, so you can send it to others.

        Args:
          path: of the file, such as ``plan.html``.

        Returns:
          The path.
        """
        target = Path(path)
        target.write_text(self.to_page(), encoding="utf-8")
        return target

    def to_page(self) -> str:
        """The page that ``show`` writes, as HTML."""
        data = plan_text.printable_data(self.to_dict())
        body = plan_page.html(data, plan_page.MOST_ALONE)
        return page.document(f"{data['function']}: plan", body)

    def plot_memory(self, ax: Any = None) -> Any:
        """Draws memory over time, of the plan and of the unchanged function.

        Args:
          ax: matplotlib axes; the current ones if None.

        Returns:
          The axes.

        Raises:
          MissingPackageError: matplotlib is not installed.
        """
        data = self.to_dict()
        return plots.memory(plan_words.charts(data), plan_words.title(data), ax)

    def diff(self, other: Plan) -> PlanDifference:
        """What another plan does differently: fates by value, regions, loops and bytes.

        Args:
          other: the second plan, preferably for the same program.

        Returns:
          A record that shows itself as a table.
        """
        return difference(self.to_dict(), other.to_dict())

    def to_source(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Source:
        """Writes the plan as ordinary JAX code, which needs no remat_opt.

        A plan does not contain the program that it is about, so give the function as well.

        Args:
          fn: the function the plan was made for, or the step that differentiates it.
          *args: its arguments: arrays, or ``jax.ShapeDtypeStruct`` in their place.
          **kwargs: options and keyword arguments, as for ``remat_opt.to_source``.

        Raises:
          PlanFileError: the plan belongs to another program.
          RematError: something in the program cannot be written as code; the message names it.
        """
        # Only here, because it stands on what stands on plans.
        from remat_opt import handover

        return handover.to_source(self, fn, *args, **kwargs)

    def __repr__(self) -> str:
        return plan_text.text(self.to_dict(), report.columns())

    def _repr_html_(self) -> str:
        return plan_page.html(plan_text.printable_data(self.to_dict()))


def _tells_alike(timeline: Mapping[str, Any]) -> bool:
    """Whether there is one entry of each kind for each moment."""
    told = [entry for name, entry in timeline.items() if name not in ("arrays", "steps")]
    return all(isinstance(one, list) and len(one) == len(timeline["at"]) for one in told)


def _check_regions(plan: Plan) -> None:
    """Raises ValueError if a decision names a region that does not exist."""
    for one in plan.decisions:
        if not 0 <= one.region < len(plan.stages):
            raise ValueError(
                f"decisions name region {one.region}, but there are only {len(plan.stages)}"
            )


def _plain(thing: Any) -> Any:
    """Records as dictionaries, tuples as lists, enums as their values."""
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return {
            field.name: _plain(getattr(thing, field.name)) for field in dataclasses.fields(thing)
        }
    if isinstance(thing, tuple | list):
        return [_plain(item) for item in thing]
    if isinstance(thing, Overhead | Gradients):
        return thing.value
    return thing


def _check_data(data: Any) -> None:
    """Raises ValueError for what no plan can hold, whatever its fields; without recursion."""
    pending = [(data, 0)]
    while pending:
        thing, depth = pending.pop()
        if isinstance(thing, dict | list):
            if depth == _MOST_DEPTH:
                raise ValueError("it nests too deep")
            items = thing.values() if isinstance(thing, dict) else thing
            pending += [(item, depth + 1) for item in items]
        elif isinstance(thing, int | float) and not abs(thing) <= _MOST_NUMBER:
            raise ValueError("it holds a number that is not finite, or is out of range")


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    """The fields of a record with their types."""
    kinds = typing.get_type_hints(kind)
    return {field.name: kinds[field.name] for field in dataclasses.fields(kind)}


def _rebuild(kind: Any, data: Any, where: str) -> Any:
    """The inverse of ``_plain``, checking every field's type."""
    origin = typing.get_origin(kind)
    if origin is UnionType or origin is typing.Union:
        if data is None and NoneType in typing.get_args(kind):
            return None
        kinds_left = [option for option in typing.get_args(kind) if option is not NoneType]
        # Their fields distinguish the records.
        fitting = (one for one in kinds_left[1:] if set(data) == set(_fields(one)))
        return _rebuild(next(fitting, kinds_left[0]), data, where)
    if origin is tuple:
        if not isinstance(data, list):
            raise TypeError(f"{where} is {data!r:.40}, not a list")
        (item, _) = typing.get_args(kind)
        return tuple(_rebuild(item, entry, f"{where}[{n}]") for n, entry in enumerate(data))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        kinds = _fields(kind)
        if not isinstance(data, Mapping) or set(data) != set(kinds):
            raise TypeError(f"{where} does not have the fields {', '.join(sorted(kinds))}")
        if kind is Stage and not data["roots"]:
            raise ValueError(f"{where} is a region that computes nothing")
        if kind is Timeline and not _tells_alike(data):
            raise ValueError(f"{where} does not have one entry for each moment")
        return kind(
            **{
                name: _rebuild(kinds[name], entry, f"{where}.{name}")
                for name, entry in data.items()
            }
        )
    if origin is Literal:
        options = typing.get_args(kind)
        if data not in options:
            raise ValueError(f"{where} is {data!r:.40}, not one of {', '.join(options)}")
        return data
    if kind in (Overhead, Gradients):
        return kind(data)
    if kind is float and type(data) in (int, float):
        return float(data)
    if type(data) is not kind:
        raise TypeError(f"{where} is {data!r:.40}, not of type {kind.__name__}")
    return data
