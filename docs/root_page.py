"""The parser for pages that lie in the root of the repository, where README.md and the like have to be."""

import os
import re
from pathlib import Path

from docutils.nodes import document
from myst_parser.parsers.sphinx_ import MystParser

__all__ = ["Parser", "redirect"]

DOCS = Path(__file__).parent
LINK = re.compile(r"(\]\()([^)\s#]+)")
PAGES = {"README.md": "index.rst", "CONTRIBUTING.md": "contributing.rst", "CHANGELOG.md": "changelog.rst"}


class Parser(MystParser):
    """As MyST's own, with links from the root made links from docs/."""

    def parse(self, inputstring: str, document: document) -> None:
        """Parse the page."""
        super().parse(redirect(inputstring, DOCS.parent), document)


def redirect(text: str, folder: Path) -> str:
    """The text of a page in ``folder``, with its links to files as a page in docs/ of the site has them."""

    def target(found: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / found[2]))
        if not path.exists():  # a link to another site, or no link but code; what is broken is told by MyST
            return found[0]
        return found[1] + PAGES.get(os.path.relpath(path, DOCS.parent), os.path.relpath(path, DOCS))

    return LINK.sub(target, text)
