"""What the public functions say about options and arguments that nothing takes."""

import jax
import jax.numpy as jnp
import pytest

import remat_opt
from remat_opt.errors import CallError, RematError
from remat_opt.misuse import entry_point
from remat_opt.testing import check_plan

pytestmark = pytest.mark.usefixtures("quick_search")

SHAPE = jax.ShapeDtypeStruct((16, 16), "float32")


def loss(weights, x):
    for w in weights:
        x = jnp.sin(x @ w)
    return jnp.sum(x)


decorated = remat_opt.optimal_remat(loss, device="cpu")


def step(weights, x):
    return [w - g for w, g in zip(weights, jax.grad(decorated)(weights, x), strict=True)]


ARGUMENTS = [SHAPE] * 4, SHAPE


@pytest.fixture(scope="module")
def plan():
    return remat_opt.make_plan(loss, *ARGUMENTS, device="cpu", verify=True)


#: Those that take a function and its arguments.
ENTRIES = {
    "frontier": remat_opt.frontier,
    "compare": remat_opt.compare,
    "measure": remat_opt.measure,
    "explain": remat_opt.explain,
    "make_plan": remat_opt.make_plan,
    "lint": remat_opt.lint,
    "check_plan": check_plan,
    "to_source": remat_opt.to_source,
    "nearest_policy": remat_opt.nearest_policy,
}


@pytest.fixture(params=ENTRIES)
def entry(request, plan):
    """The name of a public function, and a way to call it."""
    needs_plan = request.param in ("check_plan", "to_source", "nearest_policy")
    first = (plan,) if needs_plan else ()
    return request.param, lambda *args, **options: ENTRIES[request.param](*first, *args, **options)


def test_an_option_that_does_not_exist(entry):
    name, call = entry
    with pytest.raises(CallError) as caught:
        call(loss, *ARGUMENTS, bugdet=0.5)
    said = str(caught.value)
    assert said.startswith(f"'loss' has no argument and {name} no option 'bugdet'. ")
    advice = {"make_plan": "Did you mean 'budget'?", "compare": "Did you mean 'budgets'?"}
    assert f"{advice.get(name, 'Leave it out.')} The options are " in said


def test_arguments_that_the_function_does_not_take(entry):
    name, call = entry
    with pytest.raises(CallError, match="missing a required argument: 'x'") as caught:
        call(loss, ARGUMENTS[0])
    assert f"give {name} what it takes, (weights, x): arrays, or jax." in str(caught.value)
    with pytest.raises(CallError, match="too many positional arguments"):
        call(loss, *ARGUMENTS, SHAPE)


def test_no_function(entry):
    _, call = entry
    with pytest.raises(RematError, match=r"a function.*, not a int"):
        call(3, *ARGUMENTS)


@pytest.mark.parametrize(
    ("option", "given"),
    [("static_argnums", "a"), ("static_argnums", 1.5), ("static_argnames", 3)],
)
def test_numbers_and_names_of_arguments(entry, option, given):
    _, call = entry
    with pytest.raises(RematError, match=f"{option}={given!r}: give the n.* or a tuple of them"):
        call(loss, *ARGUMENTS, **{option: given})


def test_numbers_and_names_that_no_argument_has(entry):
    _, call = entry
    with pytest.raises(RematError, match="static_argnames names 'y', but the function's arguments"):
        call(loss, *ARGUMENTS, static_argnames="y")
    with pytest.raises(RematError, match="static_argnums names argument 9, but"):
        call(loss, *ARGUMENTS, static_argnums=9)


@pytest.mark.parametrize("name", ["frontier", "compare", "measure", "explain", "make_plan"])
def test_a_step_may_donate(name):
    options = {"budgets": [0.9], "policies": ()} if name == "compare" else {}
    call = ENTRIES[name]
    assert call(step, *ARGUMENTS, device="cpu", donate_argnums=0, **options)
    with pytest.raises(RematError, match="donate_argnums names argument 2, but"):
        call(step, *ARGUMENTS, device="cpu", donate_argnums=2, **options)
    with pytest.raises(RematError, match="donate_argnums='w': give the number"):
        call(step, *ARGUMENTS, device="cpu", donate_argnums="w", **options)


def test_a_frontier_leaves_room_for_what_the_step_holds():
    found = remat_opt.frontier(step, *ARGUMENTS, device="cpu")
    donated = remat_opt.frontier(step, *ARGUMENTS, device="cpu", donate_argnums=0)
    assert donated.limit_bytes - found.limit_bytes == 4 * 16 * 16 * 4


def test_a_measurement_reads_donation_off_the_jit():
    jitted = jax.jit(step, donate_argnums=0)
    found = remat_opt.measure(jitted, *ARGUMENTS, device="cpu")
    assert found.alias_bytes == 4 * 16 * 16 * 4


def test_options_of_a_decorator():
    with pytest.raises(CallError, match=r"optimal_remat has no option 'donate_argnums'\. "):
        remat_opt.optimal_remat(donate_argnums=0)  # type: ignore[call-arg]
    with pytest.raises(CallError, match=r"apply_plan has no option 'exists'\. Did you mean 'exist"):
        remat_opt.apply_plan("plan.json", loss, exists="keep")  # type: ignore[call-arg]


def test_errors_of_the_function_itself_pass():
    @entry_point
    def run(fn, *args, **kwargs):
        return fn(*args, **kwargs)

    def broken(x, **rest):
        raise TypeError("of its own")

    with pytest.raises(TypeError, match="of its own") as caught:
        run(broken, 1, anything=2)
    assert not isinstance(caught.value, RematError)
