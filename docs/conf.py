"""Settings of the documentation site: ``sphinx-build -W -n docs site``."""

import contextlib
import io
import os
import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

# The checkout, whether installed or not.
import remat_opt  # noqa: E402
from remat_opt import command_line  # noqa: E402

project = "remat_opt"
author = "the remat_opt authors"
project_copyright = author
version = release = remat_opt.__version__

extensions = [
    "myst_nb",  # Markdown pages and notebooks
    "sphinx.ext.autodoc",  # the reference comes from docstrings
    "sphinx.ext.napoleon",  # which follow Google's style
]
# Notebooks are shown with the outputs they are stored with. The tests run them.
nb_execution_mode = "off"
# A site built offline must not ask for a file from elsewhere.
nb_mime_priority_overrides = [("html", "text/html", 0), ("html", "image/svg+xml", 10)]
suppress_warnings = ["mystnb.unknown_mime_type"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

# Every link inside the site must lead somewhere. Names of Python, JAX and numpy are not links:
# looking them up would need the network.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!remat_opt\.).*")]

html_theme = "furo"
html_title = "remat_opt"
html_theme_options = {"navigation_with_keys": True}


def copy_notebooks(app):
    """Sphinx reads only what is in its own folder; the notebooks are beside it."""
    target = HERE / "notebooks"
    target.mkdir(exist_ok=True)
    for notebook in (HERE.parent / "notebooks").glob("*.ipynb"):
        shutil.copy(notebook, target)


def write_help(app):
    """The command line's own help, for every command."""

    def help_of(*command):
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
            command_line.main([*command, "--help"])
        return text.getvalue()

    os.environ["COLUMNS"] = "88"
    whole = help_of()
    names = re.findall(r"(?m)^    (\w+) ", whole.partition("example:")[0])
    # The example at the end is the same for all.
    pages = [whole, *(help_of(name).partition("example:")[0].rstrip() + "\n" for name in names)]
    (HERE / "reference" / "command_line.txt").write_text("\n\n".join(pages), encoding="utf-8")


def setup(app):
    """Called by Sphinx."""
    app.connect("builder-inited", copy_notebooks)
    app.connect("builder-inited", write_help)
