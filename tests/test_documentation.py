"""What the documentation shows runs: its Python, its commands, and the figures of its pictures.

The Python blocks of a page run in order, as one program, in a separate folder. A block that begins
with ``# name.py`` is written to that file as well, for commands that name it. A block that must not
run has the comment ``<!-- not run: REASON -->`` on the line above it, one that needs an extra
``<!-- needs: MODULE -->``.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shlex
from pathlib import Path

import jax
import pytest

from remat_opt import command_line
from tests.devices import needs_libtpu

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Their blocks compile several programs: some seconds each. Only JAX can break what they show.
SLOW = frozenset(
    {"README.md", "docs/tutorial.md", "docs/how_to/budget.md", "docs/how_to/flax.md"}
    | {"docs/how_to/mesh.md", "docs/how_to/equinox.md", "docs/how_to/look.md"}
)

_BLOCK = re.compile(
    r"(?m)(?:^<!-- (?P<comment>.+?) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.S
)
_COMMAND = "python -m remat_opt "


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    kind: str
    text: str
    line: int
    comment: str

    @property
    def runs(self) -> bool:
        return not self.comment.startswith("not run: ")

    @property
    def needs(self) -> str:
        """A module without which the block cannot run."""
        return self.comment.removeprefix("needs: ") if self.comment.startswith("needs: ") else "jax"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            kind=found["kind"],
            text=found["text"],
            line=text.count("\n", 0, found.start("text")) + 1,
            comment=found["comment"] or "",
        )
        for found in _BLOCK.finditer(text)
    ]


def commands(text: str) -> list[list[str]]:
    """Calls of this package's command line among lines for a shell, without what prints help."""
    lines = text.replace("\\\n", " ").splitlines()
    found = [shlex.split(line.removeprefix(_COMMAND)) for line in lines if _COMMAND in line]
    return [arguments for arguments in found if "--help" not in arguments]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


WITH_BLOCKS = [
    pytest.param(
        page,
        id=name(page),
        marks=[pytest.mark.slow, pytest.mark.versions] if name(page) in SLOW else [],
    )
    for page in PAGES
    if any(block.kind == "python" for block in blocks(page))
]


@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_runs_as_it_is_printed(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code = "".join(one.text for one in blocks(page) if one.kind == "python" and one.runs)
    for module in set(re.findall(r"(?m)^(?:import|from) (\w+)", code)):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    space = {"__name__": "__main__"}
    for block in blocks(page):
        if not block.runs or importlib.util.find_spec(block.needs) is None:
            continue
        if block.kind == "python":
            # The line numbers of errors, and of the plan's sources, are those of the page.
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            exec(code, space)
            if file := re.match(r"# (\w+\.py)\n", block.text):
                (tmp_path / file[1]).write_text(block.text, encoding="utf-8")
        elif block.kind == "bash":
            for arguments in commands(block.text):
                assert command_line.main(arguments) == 0, capsys.readouterr().err


def test_every_block_that_does_not_run_says_why():
    idle = [block.comment for page in PAGES for block in blocks(page) if not block.runs]
    assert all(len(comment.removeprefix("not run: ").split()) >= 3 for comment in idle), idle


@pytest.mark.slow
def test_pictures_show_what_the_solvers_answer():
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "draw.py")
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    stored = json.loads((ROOT / "docs" / "pictures" / "figures_algorithms.json").read_text())
    assert json.loads(json.dumps(draw.figures())) == stored


@needs_libtpu
@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.versions
def test_the_explanation_on_its_page_is_what_the_command_prints(monkeypatch, capsys):
    """All of it with the version that it was made with; with others, only the top."""
    pytest.importorskip("optax")
    folder = ROOT / "docs" / "how_to"
    page = folder / "explain.md"
    (stored,) = (block.text for block in blocks(page) if block.kind == "text")
    (command,) = re.findall(rf"`{_COMMAND}(explain gpt_step[^`]*)`", page.read_text("utf-8"))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("COLUMNS", "110")
    assert command_line.main(shlex.split(command)) == 0
    shown = capsys.readouterr().out
    if jax.__version__.startswith("0.12."):
        assert shown == stored
    else:
        first, second = shown.splitlines()[:2]
        assert first == stored.splitlines()[0]
        assert second.endswith("too much: it does not fit")
        assert re.search(r"exponential.*block_\*\s+gpt_step.py:13 \(attention\)", shown)


def test_pages_show_pictures_that_are_there():
    shown = {
        (page.parent / link).resolve()
        for page in PAGES
        for link in re.findall(r"!\[[^\]]*\]\(([^)]+\.svg)\)", page.read_text(encoding="utf-8"))
    }
    assert shown == set((ROOT / "docs" / "pictures").glob("*.svg"))
