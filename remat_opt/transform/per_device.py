"""What each device does with its own part of some arrays, where the compiler splits the rest.

The compiler cannot split what packs elements into others: it would put whole arrays together on
every device. Inside a ``shard_map`` it need not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from remat_opt import _jax_internals as internals
from remat_opt import _jax_meshes
from remat_opt.compilers import tiles
from remat_opt.device import Platform
from remat_opt.program.record import axis_names
from remat_opt.schedule import Split
from remat_opt.transform.stacked import entry_of

_Run = TypeVar("_Run", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The devices that share the inputs of a loop.

    Attributes:
      platform: whose compiler is expected.
      mesh: the mesh they form; None if each array is on one device, or nothing is known.
      splits: how each input is split over them; empty without a mesh.
    """

    platform: Platform
    mesh: Any = None
    splits: Sequence[Split] = ()

    def split(self, number: int) -> Split:
        """How an input is split."""
        return self.splits[number] if self.splits else ()

    def part(self, kind: Any, split: Split) -> Any:
        """The type of one device's part of an array.

        Returns:
          None if parts cannot all have the same shape, and for keys.
        """
        if self.mesh is None:
            return kind
        if jnp.issubdtype(kind.dtype, jax.dtypes.prng_key):
            return None
        ways = [math.prod(self.mesh.shape[name] for name in axis) for axis in split]
        ways += [1] * (len(kind.shape) - len(ways))
        if any(extent % way for extent, way in zip(kind.shape, ways, strict=True)):
            return None
        shape = [extent // way for extent, way in zip(kind.shape, ways, strict=True)]
        return jax.ShapeDtypeStruct(shape, kind.dtype, weak_type=kind.weak_type)

    def entry(self, number: int, stacked: Any, place: Any) -> Any:
        """One entry of an input that is a stack."""
        return self.as_stored(number, entry_of(stacked, place))

    def as_stored(self, number: int, entry: Any) -> Any:
        """An entry of an input that is a stack, laid out as it is in there if that matters."""
        split = self.split(number)[1:]
        whole = tiles.is_transposed_whole(self.platform, split)
        if not whole or self.part(entry, split) is None:
            return entry

        @jax.custom_jvp
        def run(entry: Any) -> Any:
            def of_part(one: Any) -> Any:
                return internals.laid_out(one, one.ndim - 1)

            return self.alone(of_part, (split,), split)(entry)

        # Only what is read has an order in memory.
        run.defjvp(lambda primals, tangents: (run(*primals), *tangents))
        return run(entry)

    def splits_of(
        self, run: Callable[..., Sequence[Any]], kinds: Sequence[Any], given: Sequence[Split]
    ) -> list[Split | None]:
        """How the compiler splits the results of a function.

        Args:
          run: the function.
          kinds: the types of its arguments.
          given: how these are split.

        Returns:
          None for what is split in a way that JAX has no word for.
        """
        assert self.mesh is not None, "there is a mesh"
        arguments = [
            jax.ShapeDtypeStruct(
                kind.shape,
                kind.dtype,
                weak_type=kind.weak_type,
                sharding=NamedSharding(self.mesh, PartitionSpec(*split)),
            )
            for kind, split in zip(kinds, given, strict=True)
        ]
        found = _jax_meshes.propagated(run, arguments)
        return [axis_names(spec, self.mesh.shape) for spec in found]

    def alone(self, run: _Run, taken: Sequence[Any], given: Any) -> _Run:
        """A function that each device runs on its parts.

        Args:
          run: takes and gives lists of arrays, or arrays.
          taken: how each argument is split; a list for a list.
          given: likewise its result.
        """
        if self.mesh is None:
            return run
        found: Any = jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=tuple(map(_specs, taken)),
            out_specs=_specs(given),
            check_vma=False,
        )
        return found  # type: ignore[no-any-return]


def _specs(splits: Any) -> Any:
    if isinstance(splits, list):
        return [_specs(one) for one in splits]
    return PartitionSpec(*splits)
