"""Each check, with a program in which it finds a fault and one in which it does not.

What a finding says about memory is checked with the compiler: the checkpoint in question changes
nothing, and the advice does.
"""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat_opt
from remat_opt import _jax_checkpoints
from remat_opt.errors import RematError

pytestmark = pytest.mark.usefixtures("quick_search")

S = jax.ShapeDtypeStruct
W, X = S((8, 64, 64), "float32"), S((2048, 64), "float32")
LAYOUT = ("NHWC", "HWIO", "NHWC")
KEEP = jax.checkpoint_policies.save_only_these_names


def block(x, w):
    return jnp.tanh(jnp.sin(x @ w) @ w) + x


def plain(w, x):
    for n in range(8):
        x = block(x, w[n])
    return jnp.sum(x)


def each_but_the_last(w, x):
    for n in range(8):
        x = (jax.checkpoint(block) if n < 7 else block)(x, w[n])
    return jnp.sum(x)


def each(w, x):
    for n in range(8):
        x = jax.checkpoint(block)(x, w[n])
    return jnp.sum(x)


def scanned(w, x):
    return jnp.sum(jax.lax.scan(lambda h, one: (block(h, one), None), x, w)[0])


def scanned_inside(w, x):
    return jnp.sum(jax.lax.scan(lambda h, one: (jax.checkpoint(block)(h, one), None), x, w)[0])


def with_policy(policy, named=lambda y: checkpoint_name(y, "hidden")):
    """Blocks of two products under a policy; ``named`` is done to the first."""

    def one(x, w):
        y = named(x @ w)
        return jnp.tanh(jnp.sin(y) @ w) + x

    def loss(w, x):
        for n in range(7):
            x = jax.checkpoint(one, policy=policy)(x, w[n])
        return jnp.sum(one(x, w[7]))

    return loss


def checks(fn, *args):
    return [row["check"] for row in remat_opt.lint(fn, *(args or (W, X))).rows]


def temporary_bytes(fn):
    return remat_opt.measure(jax.grad(fn), W, X, device="cpu").temporary_bytes


@pytest.fixture(scope="module")
def plain_bytes():
    return temporary_bytes(plain)


@pytest.fixture(scope="module")
def least_bytes():
    return temporary_bytes(each_but_the_last)


def test_round_the_whole_loss(plain_bytes, least_bytes):
    whole = jax.checkpoint(plain)
    found = remat_opt.lint(whole, W, X)
    assert [row["check"] for row in found.rows] == ["round-everything"]
    assert "put one around each block but the last" in found.rows[0]["remedy"]
    assert found.rows[0]["source"].startswith("test_linting.py:")
    assert checks(each_but_the_last) == []
    assert temporary_bytes(whole) > 0.9 * plain_bytes > 1.5 * least_bytes


def test_round_a_part_only():
    def half(w, x):
        for n in range(4):
            x = block(x, w[n])
        return jax.checkpoint(lambda x: plain(w, x))(x)

    assert checks(half) == []


def test_round_everything_with_a_policy_that_keeps_something():
    def one(x, w):
        return jnp.sin(checkpoint_name(x @ w, "hidden"))

    def loss(w, x):
        for n in range(8):
            x = one(x, w[n])
        return jnp.sum(x)

    assert checks(jax.checkpoint(loss, policy=KEEP("hidden"))) == []
    assert checks(jax.checkpoint(loss, policy=jax.checkpoint_policies.dots_saveable)) == []
    policy = jax.checkpoint_policies.nothing_saveable
    assert checks(jax.checkpoint(loss, policy=policy)) == ["round-everything"]


def test_round_a_scan(plain_bytes):
    whole = jax.checkpoint(scanned)
    found = remat_opt.lint(whole, W, X)
    assert [row["check"] for row in found.rows] == ["round-everything"]
    assert (
        found.rows[0]["remedy"]
        == "put the checkpoint, with its policy, around the body of the scan"
    )
    assert checks(scanned_inside) == []
    without, inside = temporary_bytes(scanned), temporary_bytes(scanned_inside)
    assert temporary_bytes(whole) > 0.9 * without > 1.5 * inside


def test_a_policy_round_a_scan_before_a_head():
    """The names are kept, but everything else in all iterations is recomputed at once."""

    def body(h, w):
        return jnp.sin(jnp.tanh(checkpoint_name(h @ w, "hidden")) @ w) + h, None

    def loss_of(around, within):
        def run(w, x):
            return jax.lax.scan(within(body), x, w)[0]

        return lambda w, x: jnp.sum(jnp.sin(around(run)(w, x) @ w[0]) @ w[1])

    def policy(fn):
        return jax.checkpoint(jax.jit(fn), policy=KEEP("hidden"))

    def none(fn):
        return fn

    round_it, inside, plain = loss_of(policy, none), loss_of(none, policy), loss_of(none, none)
    assert checks(round_it) == ["round-everything"]
    assert checks(inside) == []
    assert temporary_bytes(inside) < 0.7 * temporary_bytes(plain) < temporary_bytes(round_it)


def test_round_the_last_block(least_bytes):
    found = remat_opt.lint(each, W, X)
    assert [row["check"] for row in found.rows] == ["round-the-last"]
    assert "Do: leave it off, and compile both ways" in repr(found)
    assert temporary_bytes(each) >= 0.98 * least_bytes
    assert checks(each_but_the_last) == []


def test_the_last_block_saves_a_few_of_its_own_values_at_most():
    """Eight per cent of all temporaries here: no check may say that it does nothing."""

    def normal(x):
        return (x - x.mean((0, 1, 2))) * jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-5)

    def residual(x, w):
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=LAYOUT)
        y = jax.nn.relu(normal(y))
        y = jax.lax.conv_general_dilated(y, w, (1, 1), "SAME", dimension_numbers=LAYOUT)
        return jax.nn.relu(x + normal(y))

    def loss_of(count):
        def loss(w, x):
            for n in range(4):
                x = (jax.checkpoint(residual) if n < count else residual)(x, w[n])
            return jnp.mean(x**2)

        return loss

    w, x = S((4, 3, 3, 32, 32), "float32"), S((16, 32, 32, 32), "float32")
    (row,) = remat_opt.lint(loss_of(4), w, x).rows
    assert row["message"].endswith("At most, that saves a few of its own values")
    every, but_the_last = (
        remat_opt.measure(jax.grad(loss_of(count)), w, x, device="cpu").temporary_bytes
        for count in (4, 3)
    )
    assert 0 < but_the_last - every <= 3 * x.size * 4


@pytest.mark.parametrize("kind", ["scan", "fori_loop"])
def test_round_the_last_loop(kind):
    """Its own values all exist at once either way."""

    def run(w, x):
        if kind == "scan":
            return jax.lax.scan(lambda h, one: (block(h, one), None), x, w)[0]
        return jax.lax.fori_loop(0, len(w), lambda n, h: block(h, w[n]), x)

    def loss_of(*around):
        def loss(w, x):
            for one in around:
                x = one(run)(w, x)
            return jnp.sum(x)

        return loss

    def none(fn):
        return fn

    checkpoint = jax.checkpoint
    every, but_the_last = loss_of(*[checkpoint] * 3), loss_of(checkpoint, checkpoint, none)
    assert checks(every) == ["round-the-last"]
    assert "put it around the body of that loop" in repr(remat_opt.lint(every, W, X))
    assert checks(but_the_last) == []
    assert temporary_bytes(but_the_last) <= temporary_bytes(every)


def test_a_block_before_a_head_is_not_the_last():
    def loss(w, x):
        for n in range(7):
            x = jax.checkpoint(block)(x, w[n])
        return jnp.sum(jnp.exp(x @ w[7]))

    assert checks(loss) == []


def test_a_name_that_no_value_has():
    misspelt = with_policy(KEEP("hiden"))
    found = remat_opt.lint(misspelt, W, X)
    assert {row["check"] for row in found.rows} == {"name-without-value"}
    assert "'hiden'" in found.rows[0]["message"]
    assert "the names there are 'hidden'" in found.rows[0]["message"]
    right = with_policy(KEEP("hidden"))
    assert checks(right) == []
    nothing = with_policy(jax.checkpoint_policies.nothing_saveable)
    assert temporary_bytes(misspelt) == temporary_bytes(nothing) < temporary_bytes(right)


def test_a_name_in_a_scan_is_found():
    def named(h, w):
        return jnp.sin(checkpoint_name(h @ w, "hidden")), None

    def loss(w, x):
        x, _ = jax.lax.scan(named, x, w[:4])
        return x

    def two(w, x):
        x = jax.checkpoint(loss, policy=KEEP("hidden"))(w, x)
        return jnp.sum(loss(w[4:], x))

    assert checks(two) == []


def test_a_name_that_nothing_reads():
    def name_and_forget(y):
        checkpoint_name(y, "hidden")
        return y

    forgotten = with_policy(KEEP("hidden"), name_and_forget)
    found = remat_opt.lint(forgotten, W, X)
    assert {row["check"] for row in found.rows} == {"name-unread"}
    assert found.rows[0]["remedy"] == "use its result: x = checkpoint_name(x, 'hidden')"
    nothing = with_policy(jax.checkpoint_policies.nothing_saveable)
    assert temporary_bytes(forgotten) == temporary_bytes(nothing)


def test_a_name_that_is_passed_by():
    def one(x, w):
        y = x @ w
        return jnp.tanh(checkpoint_name(y, "hidden") @ w) * jnp.cos(y)

    def linear(x, w):
        y = x @ w
        return jnp.tanh(checkpoint_name(y, "hidden") @ w) + y

    def loss_of(one):
        def loss(w, x):
            x = jax.checkpoint(one, policy=KEEP("hidden"))(x, w[0])
            return jnp.sum(block(x, w[1]))

        return loss

    found = remat_opt.lint(loss_of(one), W, X)
    assert [row["check"] for row in found.rows] == ["name-passed-by"]
    assert "'hidden' is kept, but cos at test_linting.py:" in found.rows[0]["message"]
    # An addition does not need what it has added.
    assert checks(loss_of(linear)) == []

    def products(fn):
        return str(jax.make_jaxpr(jax.grad(fn))(W, X)).count("dot_general[")

    assert products(loss_of(one)) == products(loss_of(linear)) + 1


@pytest.mark.parametrize(
    "move", [lambda y: y.reshape(-1, 8, 8), lambda y: y.astype("bfloat16"), jnp.transpose]
)
def test_a_value_that_is_kept_twice(move):
    def loss_of(policy, move=move):
        def one(x, w):
            y = checkpoint_name(x @ w, "hidden")
            moved = jnp.tanh(checkpoint_name(move(y), "moved").astype("float32")).reshape(-1)
            return x + moved.reshape(y.shape) * jnp.sin(y)

        return lambda w, x: jnp.sum(
            jax.lax.scan(
                lambda h, one_w: (jax.checkpoint(one, policy=policy)(h, one_w), None), x, w
            )[0]
        )

    twice = loss_of(KEEP("hidden", "moved"))
    found = remat_opt.lint(twice, W, X)
    assert [row["check"] for row in found.rows] == ["kept-twice"]
    assert "'moved' is kept, and so is the value at test_linting.py:" in found.rows[0]["message"]
    dots = jax.checkpoint_policies.dots_saveable
    both = jax.checkpoint_policies.save_from_both_policies(dots, KEEP("moved"))
    assert checks(loss_of(both)) == ["kept-twice"]
    for policy in (KEEP("hidden"), KEEP("hidden", "other")):
        assert "kept-twice" not in checks(loss_of(policy))
    assert "kept-twice" not in checks(loss_of(KEEP("hidden", "moved"), lambda y: y))
    assert temporary_bytes(twice) > 1.15 * temporary_bytes(loss_of(KEEP("hidden")))


def test_what_only_the_move_reads_is_kept_once():
    def one(x, w):
        y = checkpoint_name(x @ w, "hidden")
        return x + jnp.tanh(checkpoint_name(y.reshape(-1), "moved")).reshape(y.shape)

    def loss(w, x):
        x = jax.checkpoint(one, policy=KEEP("hidden", "moved"))(x, w[0])
        return jnp.sum(block(x, w[1]))

    assert checks(loss) == []


def test_a_policy_that_keeps_everything(plain_bytes):
    broken = with_policy(jax.checkpoint_policies.save_anything_except_these_names("hidden"))
    found = remat_opt.lint(broken, W, X)
    assert {row["check"] for row in found.rows} == {"keeps-everything"}
    everything = with_policy(jax.checkpoint_policies.everything_saveable)
    assert checks(everything) == []
    assert temporary_bytes(broken) == temporary_bytes(everything)


@pytest.fixture
def new_checkpoint():
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", False)


def own(prim, *_, **__):
    return prim.name == "dot_general"


def test_a_policy_of_ones_own_without_the_flag():
    assert checks(with_policy(own)) == []


def test_a_policy_of_ones_own_with_the_flag(new_checkpoint):
    ignored = _jax_checkpoints.ignores_plain_policies()
    expected = {"own-policy"} if ignored else set()
    assert set(checks(with_policy(own))) == expected
    assert checks(with_policy(KEEP("hidden"))) == []
    assert checks(with_policy(jax.checkpoint_policies.dots_saveable)) == []
    assert _jax_checkpoints.uses_new_checkpoint(), "the flag is as it was"


def test_an_ignored_policy_is_told(new_checkpoint, monkeypatch):
    """Tests the check itself, even in versions of JAX that follow such policies."""
    monkeypatch.setattr(_jax_checkpoints, "ignores_plain_policies", lambda: True)
    found = remat_opt.lint(with_policy(own), W, X)
    assert {row["check"] for row in found.rows} == {"own-policy"}
    assert "jax_remat3 is on" in found.rows[0]["message"]


def custom(named):
    @jax.custom_vjp
    def product(x, w):
        return jnp.tanh(x @ w)

    def forward(x, w):
        y = named(jnp.tanh(x @ w))
        return y, (y, x, w)

    def backward(kept, g):
        y, x, w = kept
        d = g * (1 - y * y)
        return d @ w.T, x.T @ d

    product.defvjp(forward, backward)

    def one(x, w):
        return checkpoint_name(product(x, w), "out") + x

    def loss(w, x):
        for n in range(3):
            x = jax.checkpoint(one, policy=KEEP("out", "inside"))(x, w[n])
        return jnp.sum(jnp.sin(x @ w[3]))

    return loss


def test_residuals_of_a_rule_without_names():
    found = remat_opt.lint(custom(lambda y: y), W, X)
    rows = [row for row in found.rows if row["check"] == "residuals-without-names"]
    assert len(rows) == 1, "one line, told once"
    assert "product keeps 512 KiB for its backward rule" in rows[0]["message"]
    named = custom(lambda y: checkpoint_name(y, "inside"))
    assert "residuals-without-names" not in checks(named)

    def products(fn):
        return str(jax.make_jaxpr(jax.grad(fn))(W, X)).count("dot_general[")

    assert products(custom(lambda y: y)) > products(named)


def test_a_rule_that_keeps_its_inputs_only():
    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))

    def loss(w, x):
        def one(x, w):
            return clipped(checkpoint_name(x @ w, "hidden"))

        x = jax.checkpoint(one, policy=KEEP("hidden"))(x, w[0])
        return jnp.sum(block(x, w[1]))

    assert checks(loss) == []


def test_what_is_found_as_text_page_and_data():
    found = remat_opt.lint(each, W, X)
    assert len(found) == 1
    first, second, third = repr(found).splitlines()
    assert first == "Checkpoints of each that do little or nothing: 1 found, in 8 checkpoints"
    assert second.startswith("test_linting.py:")
    assert ": round-the-last: " in second
    assert third.startswith("    Do: leave it off, and compile both ways with remat_opt.measure")
    assert "round-the-last" in found._repr_html_()
    assert json.loads(found.to_json())["rows"] == list(found.rows)
    nothing = remat_opt.lint(plain, W, X)
    assert not nothing
    assert (
        repr(nothing)
        == "Checkpoints of plain that do little or nothing: none found, in 0 checkpoints"
    )
    assert "<table" not in nothing._repr_html_()


def test_a_gradient_is_refused():
    with pytest.raises(RematError, match="Give lint the loss that it differentiates"):
        remat_opt.lint(jax.grad(each), W, X)


def test_static_arguments_and_decorated_losses():
    def loss(w, x, count):
        for n in range(count):
            x = jax.checkpoint(block)(x, w[n])
        return jnp.sum(x)

    assert [row["check"] for row in remat_opt.lint(loss, W, X, 8, static_argnums=2).rows]
    assert remat_opt.lint(loss, W, X, count=8, static_argnames="count")
    assert remat_opt.lint(remat_opt.optimal_remat(each, device="cpu"), W, X)
