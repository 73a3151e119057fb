"""Settings of the documentation's site: `make docs` builds it, and warnings are errors.

Pages are Markdown. The reference of the Python API comes from docstrings, that of the command line
from click, that of the settings from `docs/make_configuration.py`. Importing `dask_gpurt` loads
nothing else, so a build needs neither a cluster nor a GPU.
"""

from __future__ import annotations

import inspect
import pathlib
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sphinx.util import logging  # noqa: E402

import dask_gpurt  # noqa: E402
from dask_gpurt import errors  # noqa: E402

project = "dask_gpurt"
author = "the dask_gpurt developers"
copyright = "2026, the dask_gpurt developers"
version = release = dask_gpurt.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "numpydoc",
    "sphinx_click",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

myst_heading_anchors = 4

# Docstrings mark code with single backticks, which reStructuredText gives no meaning of its own.
default_role = "code"
nitpicky = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_validation_checks = {"GL01", "GL08", "RT03", "SS01"}

copybutton_exclude = ".linenos, .gp, .go"

html_theme = "pydata_sphinx_theme"
html_title = "dask_gpurt"
html_show_sourcelink = False
html_theme_options: dict[str, Any] = {
    "show_prev_next": True,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}

logger = logging.getLogger(__name__)


def public_names() -> dict[str, Any]:
    """Return what the package promises to its users, by full name."""
    functions = {name: getattr(dask_gpurt, name) for name in dask_gpurt.__all__}
    exceptions = {
        f"errors.{name}": one
        for name, one in vars(errors).items()
        if inspect.isclass(one) and issubclass(one, errors.GpurtError)
    }
    promised = {**functions, **exceptions}
    return {f"dask_gpurt.{name}": one for name, one in promised.items() if name != "__version__"}


def check_public_names(app: Any, env: Any) -> None:
    """Warn of every public name that has no docstring, or that no page documents."""
    documented = env.get_domain("py").objects
    for name, one in public_names().items():
        if not inspect.getdoc(one):
            logger.warning("%s has no docstring", name)
        if name not in documented:
            logger.warning("%s is on no page of the reference", name)


def setup(app: Any) -> None:
    """Register the check of public names."""
    app.connect("env-check-consistency", check_public_names)
