"""The kernels that users get, for tests that look at how XLA for CPU rounds or counts."""

from __future__ import annotations

from typing import Any

import jax

#: Compiler options that undo what ``conftest`` does to compile faster with JAX 0.10.
USERS_KERNELS: dict[str, Any] = (
    {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}
)
