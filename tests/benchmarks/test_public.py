"""The set of public models, whose package is no dependency."""

from __future__ import annotations

import sys

import jax
import pytest

from benchmarks import networks
from benchmarks.networks import keras_models, public


def test_they_are_a_set_of_their_own() -> None:
    names = set(networks.PUBLIC)
    assert names
    assert {networks.set_of(name) for name in names} == {"public"}
    assert names.isdisjoint((*networks.names(), *networks.IDIOMS))
    batches = public.PUBLIC | keras_models.KERAS
    assert all(networks.default_batch(name) == batches[name] for name in names)
    with pytest.raises(ValueError, match="has no blocks: leave block_policy out"):
        networks.build(networks.PUBLIC[0], 1, block_policy="dots_saveable")


def test_without_the_package_an_error_says_where_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, name in (("transformers", "public_gpt2"), ("keras", "keras_bert")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=r"see benchmarks/README\.md"):
            networks.build(name, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", networks.PUBLIC)
def test_losses_are_scalars(name: str) -> None:
    pytest.importorskip("keras_hub" if name in keras_models.KERAS else "transformers")
    network = networks.build(name, 2)
    loss = jax.eval_shape(network.loss_fn, *network.arguments)
    if network.has_aux:
        loss, _ = loss
    assert (loss.shape, loss.dtype) == ((), "float32")
