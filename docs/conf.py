"""How the site is built of these pages, of the root's and of docstrings: ``make docs``."""

import pkgutil
import sys
from pathlib import Path

from docutils.nodes import Element, TextElement
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

from docs.root_page import redirect  # noqa: E402
from docs.site_check import problems  # noqa: E402
from paceline import __version__  # noqa: E402 (the one beside these pages)

project, author, release = "Paceline", "the authors of Paceline", __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["pictures"]
nitpicky = True  # a name in a docstring that is not there is a warning, and so an error
nitpick_ignore_regex = [(r"py:.*", r"(?!paceline).*")]  # names of others, which are not looked for on the network

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"Paceline {release}"
html_copy_source = False
html_show_copyright = False


def read_page(app: Sphinx, name: str, source: list[str]) -> None:
    """A page of docs/ may link to those of the root."""
    source[0] = redirect(source[0], DOCS)


def name_without_link(app: Sphinx, env: BuildEnvironment, node: pending_xref, text: TextElement) -> Element | None:
    """What a docstring names, and is there, but is not public; what is not there stays a warning."""
    name = node["reftarget"]
    if node.get("refdomain") != "py" or not name.startswith("paceline."):
        return None
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None
    return text


def check(app: Sphinx, error: Exception | None) -> None:
    """The pages as they were written: every link leads somewhere, and nothing comes from elsewhere."""
    if error is None and app.builder.name == "html" and (found := problems(Path(app.outdir))):
        raise ExtensionError("the site is not whole:\n" + "\n".join(found))


def setup(app: Sphinx) -> None:
    """What is done beside what Sphinx does."""
    app.connect("source-read", read_page)
    app.connect("missing-reference", name_without_link)
    app.connect("build-finished", check)
