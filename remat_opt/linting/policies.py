"""Policies that JAX does not follow."""

from __future__ import annotations

from collections.abc import Iterator

from remat_opt import _jax_checkpoints
from remat_opt.linting.survey import Finding, Survey


def policies_that_keep_everything(found: Survey) -> Iterator[Finding]:
    """``save_anything_except_these_names`` ignores its names."""
    for checkpoint in found.checkpoints:
        if _jax_checkpoints.is_save_anything_except(checkpoint.policy):
            yield Finding(
                check="keeps-everything",
                message="save_anything_except_these_names ignores its names: everything is kept, "
                "as without the checkpoint",
                remedy="name what is to be kept, and use save_only_these_names",
                source=checkpoint.source,
            )


def policies_of_their_own(found: Survey) -> Iterator[Finding]:
    """A user's own function as a policy, under the flag ``jax_remat3`` of some versions of JAX."""
    if not (_jax_checkpoints.uses_new_checkpoint() and _jax_checkpoints.ignores_plain_policies()):
        return
    for checkpoint in found.checkpoints:
        if _jax_checkpoints.is_plain_policy(checkpoint.policy):
            yield Finding(
                check="own-policy",
                message="the flag jax_remat3 is on, and under it this version of JAX ignores a "
                "policy that is a custom function: everything is recomputed",
                remedy="name what is to be kept, and use save_only_these_names; or turn the flag "
                "off",
                source=checkpoint.source,
            )
