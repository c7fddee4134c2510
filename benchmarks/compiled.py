"""A network on a device: its training steps compiled, their FLOPs counted, as rows to print."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import optax

import remat_opt
from benchmarks import networks
from benchmarks.kept import Kept
from benchmarks.networks import Network
from remat_opt.gradients import Gradients
from remat_opt.measurement import compilation
from remat_opt.measurement.compilation import Measurement
from remat_opt.plan import Plan
from remat_opt.program import flop_count
from remat_opt.training import training_step
from remat_opt.units import format_bytes, format_share

#: The steps, and what happens to gradients in each: ``adam`` updates parameters and state, which
#: are donated; ``gradient`` is the gradient alone.
STEPS = {"adam": Gradients.CONSUMED, "gradient": Gradients.RESULTS}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is measured, and the figures that every row refers to.

    Attributes:
      name: the network's name, as ``benchmarks.networks`` lists it.
      batch: examples in a batch.
      device: name of the device compiled for.
      step: one of ``STEPS``.
      network: the network as it is.
      forward_flops: FLOPs of one forward pass.
      gradient_flops: FLOPs of its gradient, without any checkpoint.
      kept: where to look up first what the compiler says, if anywhere.
    """

    name: str
    batch: int
    device: str
    step: str
    network: Network
    forward_flops: int
    gradient_flops: int
    kept: Kept | None = None

    def recomputed_flops(self, loss_fn: Callable[..., Any]) -> int:
        """FLOPs of a loss's gradient beyond those of the plain one."""
        flops = flop_count.gradient_flops(
            loss_fn, *self.network.arguments, has_aux=self.network.has_aux
        )
        return flops - self.gradient_flops

    def measure(self, loss_fn: Callable[..., Any], *, with_buffers: bool = False) -> Measurement:
        """Compiles the step with a loss that takes the network's arguments.

        Args:
          loss_fn: the loss.
          with_buffers: whether to read what is alive when; kept results do not have that.

        Raises:
          CompileError: the compiler refused.
        """
        step, arguments, donated = self._step(loss_fn)
        key = None if self.kept is None else self.kept.key(self.device, step, arguments)
        found = None if self.kept is None or key is None else self.kept.get(key)
        if found is None:
            found = compilation.measure(
                step,
                *arguments,
                device=self.device,
                donate_argnums=donated,
                with_buffers=with_buffers,
            )
            if self.kept is not None and key is not None:
                self.kept.put(key, found)
        return found

    def _step(
        self, loss_fn: Callable[..., Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
        """The step with a loss, its arguments, and the numbers of the donated ones."""
        has_aux = self.network.has_aux
        if self.step == "gradient":
            return jax.grad(loss_fn, has_aux=has_aux), self.network.arguments, ()
        params, batch = self.network.arguments
        optimizer = optax.adam(1e-3)
        state = jax.eval_shape(optimizer.init, params)
        step = training_step(loss_fn, optimizer, has_aux=has_aux)
        return step, (params, state, batch), (0, 1)

    def planned(self, plan: Plan) -> Callable[..., Any]:
        """The network's loss, rewritten by a plan."""
        loss_fn: Callable[..., Any] = remat_opt.apply_plan(
            plan, self.network.loss_fn, has_aux=self.network.has_aux
        )
        return loss_fn

    def heading(self, kind: str, label: str) -> dict[str, Any]:
        """The entries that every row begins with."""
        return heading(self.name, self.batch, self.device, self.step, kind, label)

    def compiled(
        self, kind: str, label: str, loss_fn: Callable[..., Any], **more: Any
    ) -> tuple[dict[str, Any], Measurement | remat_opt.CompileError]:
        """Compiles and counts.

        Args:
          kind: ``plain``, ``policy`` or ``ours``.
          label: what to call the row.
          loss_fn: a loss with the network's results.
          **more: further entries.

        Returns:
          A row with ``recomputed_flops``, ``recomputed_flops_share`` of a forward pass, and
          ``temporary_bytes`` and ``compile_seconds``, or ``error`` if the compiler refused; and
          what the compiler says.
        """
        flops = self.recomputed_flops(loss_fn)
        given = {
            **self.heading(kind, label),
            **more,
            "recomputed_flops": flops,
            "recomputed_flops_share": round(flops / self.forward_flops, 4),
        }
        try:
            # Our plans are chosen by what is alive when.
            found = self.measure(loss_fn, with_buffers=kind == "ours")
        except remat_opt.CompileError as error:
            return {**given, "error": str(error)}, error
        row = {
            **given,
            "temporary_bytes": found.temporary_bytes,
            "compile_seconds": round(found.compile_seconds, 2),
        }
        return row, found

    def row(
        self, kind: str, label: str, loss_fn: Callable[..., Any], **more: Any
    ) -> dict[str, Any]:
        """Only the row of ``compiled``."""
        return self.compiled(kind, label, loss_fn, **more)[0]

    def with_policies(
        self, policies: Sequence[str]
    ) -> Iterator[tuple[str, Callable[[], Callable[..., Any]]]]:
        """Label and maker of the loss under each policy: around the whole, then around every block.

        Args:
          policies: names in ``jax.checkpoint_policies``, as ``benchmarks.networks`` takes them.
        """
        for name in policies:
            policy = getattr(jax.checkpoint_policies, name)
            yield f"{name}, whole", partial(jax.checkpoint, self.network.loss_fn, policy=policy)
        for name in policies:
            yield f"{name}, per block", partial(self._with_blocks, name)

    def _with_blocks(self, policy: str) -> Callable[..., Any]:
        return networks.build(self.name, self.batch, block_policy=policy).loss_fn


def heading(
    name: str, batch: int | None, device: str, step: str, kind: str, label: str
) -> dict[str, Any]:
    """The entries that a row of a network begins with; its own batch if None."""
    return {
        "set": networks.set_of(name),
        "network": name,
        "batch": networks.default_batch(name) if batch is None else batch,
        "device": device,
        "step": step,
        "jax": jax.__version__,
        "kind": kind,
        "label": label,
    }


def subject(
    name: str, batch: int | None, device: str, step: str, kept: Kept | None = None
) -> Subject:
    """Builds a network and counts its FLOPs; compiles nothing.

    Args:
      name: as ``benchmarks.networks`` lists it.
      batch: examples in a batch; the network's own if None.
      device: name of the device to compile for.
      step: one of ``STEPS``.
      kept: where to look up first what the compiler says.
    """
    batch = networks.default_batch(name) if batch is None else batch
    network = networks.build(name, batch)
    return Subject(
        name=name,
        batch=batch,
        device=device,
        step=step,
        network=network,
        forward_flops=flop_count.forward_flops(network.loss_fn, *network.arguments),
        gradient_flops=flop_count.gradient_flops(
            network.loss_fn, *network.arguments, has_aux=network.has_aux
        ),
        kept=kept,
    )


def prediction(plan: Plan) -> dict[str, Any]:
    """What a plan says about itself, as entries of a row."""
    return {
        "budget_bytes": plan.budget_bytes,
        "predicted_temporary_bytes": plan.predicted.temporary_bytes,
        "predicted_recomputed_flops_share": round(plan.predicted.recomputed_share, 4),
        "predicted_overhead_share": round(plan.predicted.overhead_share, 4),
        "regions": len(plan.stages),
    }


def table_line(row: dict[str, Any]) -> str:
    """A readable row: compiled bytes, predicted bytes, recomputed share, seconds to compile."""
    if "error" in row:
        return f"{row['label']:<56} {row['error'][:60]}"
    predicted = row.get("predicted_temporary_bytes")
    return (
        f"{row['label']:<56} {format_bytes(row['temporary_bytes']):>10} "
        f"{format_bytes(predicted) if predicted else '':>10} "
        f"{format_share(row['recomputed_flops_share']):>8} {row['compile_seconds']:>6.1f} s"
    )
