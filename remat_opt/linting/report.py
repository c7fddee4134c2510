"""Runs all checks on a function and collects what they found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from remat_opt import _jax_checkpoints
from remat_opt import _jax_internals as internals
from remat_opt.errors import RematError
from remat_opt.linting import custom_rules, names, places, policies
from remat_opt.linting.survey import Finding, Survey, survey
from remat_opt.loss_in_step import undecorated
from remat_opt.misuse import entry_point
from remat_opt.options import signature_of
from remat_opt.program import tracing
from remat_opt.view import report
from remat_opt.view.plan_text import printable

#: All checks, in the order in which their findings are listed.
CHECKS: tuple[Callable[[Survey], Iterator[Finding]], ...] = (
    places.round_everything,
    places.round_the_last,
    names.names_without_values,
    names.values_without_readers,
    names.values_passed_by,
    names.values_kept_twice,
    policies.policies_that_keep_everything,
    policies.policies_of_their_own,
    custom_rules.residuals_without_names,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Findings:
    """Checkpoints of one function that do little or nothing.

    Attributes:
      function: its name.
      checkpoints: how many it contains.
      rows: one dictionary for each finding: ``check``, ``message``, ``remedy``, ``source``.
    """

    function: str
    checkpoints: int
    rows: tuple[dict[str, Any], ...]

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def to_json(self) -> str:
        """The findings as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    def __repr__(self) -> str:
        lines = [self._title()]
        for row in self.rows:
            lines.append(f"{row['source'] or 'unknown line'}: {row['check']}: {row['message']}.")
            lines.append(f"    Do: {row['remedy']}.")
        return "\n".join(map(printable, lines))

    def _repr_html_(self) -> str:
        table = report.Table(
            headings=("source", "check", "found", "what to do"),
            rows=tuple(
                tuple(printable(row[key]) for key in ("source", "check", "message", "remedy"))
                for row in self.rows
            ),
            align="llll",
        )
        return report.section(self._title(), table.html() if self.rows else "")

    def _title(self) -> str:
        count = len(self.rows) or "none"
        checkpoints = "1 checkpoint" if self.checkpoints == 1 else f"{self.checkpoints} checkpoints"
        return (
            f"Checkpoints of {self.function} that do little or nothing: {count} found, in "
            f"{checkpoints}"
        )


@entry_point
def lint(
    fn: Callable[..., Any],
    *args: Any,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    **kwargs: Any,
) -> Findings:
    """Finds hand-written checkpoints that do little or nothing; the function is traced, not run.

    Args:
      fn: a loss function that uses ``jax.checkpoint`` and ``checkpoint_name``, or is wrapped in
        them.
      *args: its arguments: arrays, or ``jax.ShapeDtypeStruct`` in their place.
      static_argnums: as for ``jax.jit``.
      static_argnames: as for ``jax.jit``.
      **kwargs: its keyword arguments.

    Returns:
      The findings, falsy if there are none. ``rows`` are plain dictionaries.

    Raises:
      RematError: the function takes derivatives, which dissolve checkpoints.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import remat_opt
      >>> @jax.checkpoint
      ... def loss(w, x):
      ...     for _ in range(8):
      ...         x = jnp.sin(x @ w)
      ...     return jnp.sum(x)
      >>> shape = jax.ShapeDtypeStruct((64, 64), "float32")
      >>> [row["check"] for row in remat_opt.lint(loss, shape, shape).rows]
      ['round-everything']
    """
    fn = undecorated(fn)
    signature = dataclasses.replace(
        signature_of(None, False, static_argnums, static_argnames), argnums=()
    )
    call = tracing.bind_static(fn, signature, args, dict(kwargs))

    def flat(positional: Any, keywords: Any) -> Any:
        return jax.tree.leaves(call.fn(*positional, **keywords))

    closed, _ = _jax_checkpoints.with_old_checkpoint(
        lambda: internals.make_jaxpr(flat, call.args, call.kwargs)
    )
    found = survey(closed, call.name)
    if found.differentiated:
        raise RematError(
            f"{call.name!r} takes derivatives, in which JAX dissolves checkpoints. Give lint "
            "the loss that it differentiates."
        )
    rows = [finding for check in CHECKS for finding in check(found)]
    return Findings(
        function=call.name,
        checkpoints=len(found.checkpoints),
        rows=tuple(dataclasses.asdict(one) for one in dict.fromkeys(rows)),
    )
