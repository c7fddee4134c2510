"""Tries an installed wheel, in isolation (``python -I``), and checks the sdist.

python -I try_package.py FOLDER        # that has the wheel and the sdist
"""

import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp

import remat_opt

home = Path(remat_opt.__file__).parent
assert home.parent == Path(sysconfig.get_path("purelib")), f"{home} is not an installed package"
assert (home / "py.typed").is_file(), "py.typed is missing: type checkers would see no types"
assert metadata.version("remat_opt") == remat_opt.__version__


@remat_opt.optimal_remat(budget=0.5)
def loss(weights, x):
    """Has enough layers that half of the memory will do."""
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


weights, x = [jnp.ones((64, 64))] * 12, jnp.ones((256, 64))
plan = loss.plan(weights, x)
assert plan.predicted.temporary_bytes <= 0.5 * plan.predicted.plain_temporary_bytes
assert len(jax.jit(jax.grad(loss))(weights, x)) == 12
assert "<svg" in plan._repr_html_()

subprocess.run(
    [sys.executable, "-I", "-m", "remat_opt", "devices"], check=True, stdout=subprocess.DEVNULL
)

dist = Path(sys.argv[1])
((wheel,), (sdist,)) = dist.glob("*.whl"), dist.glob("*.tar.gz")
packed = {Path(name).parts[0] for name in zipfile.ZipFile(wheel).namelist()}
assert packed == {"remat_opt", f"remat_opt-{remat_opt.__version__}.dist-info"}, packed
with tarfile.open(sdist) as archive:
    names = {"/".join(Path(name).parts[1:]) for name in archive.getnames()}
# Everything installed from the wheel, apart from Python's own caches.
files = [path for path in home.rglob("*") if path.is_file() and path.suffix != ".pyc"]
modules = {f"remat_opt/{path.relative_to(home).as_posix()}" for path in files}
assert any(name.endswith(".css") for name in modules), "the page's assets are missing"
wanted = modules | {
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "docs/conf.py",
    "notebooks/first_steps.ipynb",
    "pyproject.toml",
    "remat_opt/py.typed",
    "tests/conftest.py",
}
assert wanted <= names, sorted(wanted - names)
made = sorted(
    name for name in names if name.startswith((".venv", "site/")) or "__pycache__" in name
)
assert not made, made
print(f"remat_opt {remat_opt.__version__}: the wheel works, the sdist is whole.")
