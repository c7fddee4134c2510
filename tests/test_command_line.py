import json
import subprocess
import sys

import pytest

import remat_opt
from remat_opt import command_line, device, solvers

pytestmark = pytest.mark.usefixtures("quick_search")

SOURCE = """
import jax, jax.numpy as jnp

S = jax.ShapeDtypeStruct

def loss(w, x, scale=1.0):
    for _ in range(6):
        x = jnp.sin(x @ w)
    return jnp.sum(x) * scale

def with_aux(x, w):
    return loss(w, x), x

def pair():
    return S((32, 32), "float32"), S((32, 32), "float32")

def a_list():
    return [1, 2]

def by_name():
    return {"scale": 2.0}

def clash():
    return {"device": 2.0}

number = 3

class Holder:
    loss = staticmethod(loss)
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a command in a folder with the module ``sample``; gives status, output, errors."""
    (tmp_path / "sample.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "sample", raising=False)

    def run(*arguments):
        status = command_line.main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    yield run
    sys.modules.pop("sample", None)


ARGS = ("--args", "sample:pair", "--device", "cpu")


def test_plan_prints_saves_and_writes_a_page(run, tmp_path):
    status, out, err = run(
        *("plan", "sample:loss", *ARGS, "--save", "plan.json", "--html", "plan.html")
    )
    assert (status, err) == (0, "")
    assert out.startswith("Plan of loss for cpu\nasked for   least memory\n")
    assert remat_opt.Plan.load(tmp_path / "plan.json").function == "loss"
    assert (tmp_path / "plan.html").read_text().startswith("<!DOCTYPE html>")


def test_plan_for_machines_with_all_options(run):
    status, out, err = run(
        *("plan", "sample:with_aux", *ARGS, "--has-aux", "--argnums", "0,1", "--json"),
        *("--max-overhead", "0.5", "--overhead", "flops", "--verify"),
    )
    assert (status, err) == (0, "")
    plan = remat_opt.Plan.from_json(out)
    assert plan.objective.max_overhead == 0.5
    assert plan.objective.overhead.value == "flops"
    assert plan.measured.temporary_bytes > 0


def test_budgets_are_bytes_or_shares(run):
    _, out, _ = run("plan", "sample:loss", *ARGS, "--budget", "0.8", "--json")
    assert remat_opt.Plan.from_json(out).objective.budget_share == 0.8
    _, out, _ = run("plan", "sample:loss", *ARGS, "--budget", "1MiB", "--json")
    assert remat_opt.Plan.from_json(out).budget_bytes == 1024**2
    _, out, _ = run("plan", "sample:loss", *ARGS, "--budget", "1048576", "--json")
    assert remat_opt.Plan.from_json(out).budget_bytes == 1024**2


def test_keyword_arguments_and_attributes(run):
    status, _, err = run("plan", "sample:Holder.loss", *ARGS, "--kwargs", "sample:by_name")
    assert (status, err) == (0, "")


def test_compare_prints_one_row_a_line(run, tmp_path):
    status, out, err = run(
        *("compare", "sample:loss", *ARGS, "--budget", "0.7", "--budget", "1"),
        *("--max-overhead", "0", "--policies", "nothing_saveable", "--json", "--html", "c.html"),
    )
    assert (status, err) == (0, "")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["label"] for row in rows] == [
        *(
            "plain",
            "nothing_saveable",
            "nothing_saveable, per block",
            "budget 70.0 %",
            "budget 1",
            "overhead 0 %",
        )
    ]
    assert {row["function"] for row in rows} == {"loss"}
    assert "<svg" in (tmp_path / "c.html").read_text()


def test_compare_without_policies(run):
    status, out, _ = run("compare", "sample:loss", *ARGS, "--policies", "none", "--budget", "0.7")
    assert status == 0
    assert out.startswith("Gradient of loss for cpu\n")
    assert "saveable" not in out


def test_devices(run):
    status, out, _ = run("devices")
    assert status == 0
    assert all(any(line.startswith(name) for line in out.splitlines()) for name in ("cpu", "h200"))
    _, out, _ = run("devices", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["name"] for row in rows] == list(device.available())
    assert rows[0]["memory_bytes"] == 64 * 1024**3


def test_solvers(run):
    status, out, _ = run("solvers")
    assert status == 0
    assert any(line.startswith("portfolio") for line in out.splitlines())
    _, out, _ = run("solvers", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["name"] for row in rows] == [row.name for row in solvers.available()]


def test_plan_by_another_solver(run):
    status, out, _ = run("plan", "sample:loss", *ARGS, "--solver", "approximate_dp", "--json")
    assert status == 0
    assert json.loads(out)["plan"]["solver"] == "approximate_dp"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("sample.py", *ARGS),
            "'sample.py' is not of the form MODULE:FUNCTION, such as train:loss for the function "
            "loss in train.py.",
        ),
        (
            ("missing.module:loss", *ARGS),
            "There is no module 'missing', which 'missing.module:loss' names: give it as in an "
            "import statement (no .py). Looked in the current directory, {folder}, and where "
            "Python finds modules.",
        ),
        (("sample:lost", *ARGS), "'sample:lost': 'sample' has no 'lost'."),
        (("sample:number", *ARGS), "'sample:number' is not a function, but of type int."),
        (
            ("sample:loss", "--args", "sample:a_list"),
            "--args sample:a_list returned a list: return the tuple of the loss function's "
            "arguments; for a single one, (argument,).",
        ),
        (
            ("sample:loss", *ARGS, "--kwargs", "sample:a_list"),
            "--kwargs sample:a_list returned a list: return a dictionary from names of arguments "
            "to arguments.",
        ),
        (
            ("sample:loss", *ARGS, "--kwargs", "sample:clash"),
            "--kwargs sample:clash has 'device', which is also an option of remat_opt: wrap "
            "the loss in a function that names the argument differently.",
        ),
        (
            ("sample:loss", *ARGS, "--save", "no/such/folder.json"),
            "'no/such/folder.json' cannot be written: No such file or directory.",
        ),
        (
            ("sample:loss", *ARGS, "--html", "no/such/folder.html"),
            "'no/such/folder.html' cannot be written: No such file or directory.",
        ),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(run, tmp_path, arguments, message):
    status, _, err = run("plan", *arguments)
    assert status == 2
    assert err == f"remat_opt: {message.format(folder=tmp_path)}\n"


def test_errors_of_the_package_are_one_line_too(run):
    status, out, err = run("plan", "sample:loss", *ARGS, "--budget", "1")
    assert (status, out) == (2, "")
    assert err.startswith("remat_opt: No plan has temporaries within 1 B: ")
    assert err.count("\n") == 1


def test_a_fault_in_the_named_module_keeps_its_traceback(run):
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        run("plan", "broken:loss", *ARGS)


def test_wrong_options_are_refused_by_the_parser(run, capsys):
    with pytest.raises(SystemExit) as caught:
        run("plan", "sample:loss", *ARGS, "--argnums", "x")
    assert caught.value.code == 2
    assert "argument --argnums: 'x': give positions such as 0 or 0,2" in capsys.readouterr().err


@pytest.mark.slow
def test_as_a_module_from_a_shell():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "remat_opt", "devices"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("Devices")


def test_a_comparison_in_a_step(run):
    with open("steps.py", "w", encoding="utf-8") as file:
        file.write(
            "import jax, sample\n"
            "from remat_opt import optimal_remat\n"
            "marked = optimal_remat(sample.loss, device='cpu')\n"
            "def step(weights, *rest):\n"
            "    gradients = jax.grad(marked)(weights, *rest)\n"
            "    return jax.tree.map(lambda w, g: w - g, weights, gradients)\n"
        )
    status, out, err = run(
        *("compare", "steps:step", *ARGS, "--budget", "0.7", "--policies", "none"),
        *("--donate-argnums", "0"),
    )
    assert (status, err) == (0, "")
    assert out.startswith("step with loss for cpu")


# --- explain, lint, check -----------------------------------------------------------------

MORE = """
import jax, jax.numpy as jnp

S = jax.ShapeDtypeStruct

def loss(w, x):
    for _ in range(6):
        x = jnp.sin(x @ w)
    return jnp.sum(x)

def step(w, x):
    return w - 0.1 * jax.grad(loss)(w, x)

whole = jax.checkpoint(loss)

def changed(w, x):
    return 2 * loss(w, x)

def pair():
    return S((32, 32), "float32"), S((512, 32), "float32")
"""
MORE_ARGS = ("--args", "more:pair")


@pytest.fixture
def run_more(run, tmp_path, monkeypatch):
    (tmp_path / "more.py").write_text(MORE)
    monkeypatch.delitem(sys.modules, "more", raising=False)
    yield run
    sys.modules.pop("more", None)


def test_explain_prints_and_writes_a_page(run_more, tmp_path):
    options = (*MORE_ARGS, "--device", "cpu", "--donate-argnums", "0")
    status, out, err = run_more("explain", "more:step", *options, "--html", "page.html")
    assert (status, err) == (0, "")
    assert out.startswith("Memory of step on CPU")
    assert "more.py:8 (loss)" in out
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "<svg" in page
    _, out, _ = run_more("explain", "more:step", *options, "--json")
    assert json.loads(out)["function"] == "step"


def test_lint_exits_with_1_where_it_finds_something(run_more):
    status, out, err = run_more("lint", "more:whole", *MORE_ARGS)
    assert (status, err) == (1, "")
    assert "round-everything" in out
    status, out, _ = run_more("lint", "more:loss", *MORE_ARGS, "--json")
    assert status == 0
    assert json.loads(out) == {"function": "loss", "checkpoints": 0, "rows": []}
    status, _, err = run_more("lint", "more:step_that_is_not_there", *MORE_ARGS)
    assert status == 2
    assert "has no 'step_that_is_not_there'" in err


def test_check_exits_with_1_where_the_promise_is_broken(run_more):
    options = (*MORE_ARGS, "--device", "cpu", "--verify", "--save", "plan.json")
    assert run_more("plan", "more:loss", *options)[0] == 0
    status, out, err = run_more("check", "plan.json", "more:loss", *MORE_ARGS)
    assert (status, err) == (0, "")
    assert out.startswith("The plan of loss holds on cpu: ")
    status, out, err = run_more("check", "plan.json", "more:changed", *MORE_ARGS)
    assert (status, out) == (1, "")
    assert "'changed' is no longer the program" in err
    status, out, _ = run_more("check", "plan.json", "more:changed", *MORE_ARGS, "--json")
    assert status == 1
    assert json.loads(out)["now_bytes"] is None
    status, _, err = run_more("check", "missing.json", "more:loss", *MORE_ARGS)
    assert status == 2
