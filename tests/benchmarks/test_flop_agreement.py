"""FLOPs of a whole gradient against the compiler's own count."""

from __future__ import annotations

import jax
import pytest

import remat_opt
from benchmarks import networks
from remat_opt.program import flop_count


@pytest.mark.slow
@pytest.mark.versions
def test_resnet50_gradient_flops_agree_with_the_compiler() -> None:
    network = networks.build("resnet50", 2)
    counted = flop_count.gradient_flops(network.loss_fn, *network.arguments, has_aux=True)
    gradient = jax.value_and_grad(network.loss_fn, has_aux=True)
    measured = remat_opt.measure(gradient, *network.arguments, device="cpu").flops
    assert measured is not None
    assert counted == pytest.approx(measured, rel=0.03)
