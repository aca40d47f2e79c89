"""Looks at the site as it was written: every link leads somewhere, and no page fetches anything from elsewhere."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["problems"]

FETCHED = re.compile(r"""(?:url\(|@import)\s*["']?(?:https?:)?//[^\s"')]+""")


class Page(HTMLParser):
    """The anchors of a page, where its links lead, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors, self.links, self.loads = {""}, list[str](), list[str]()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Whatever the tag: those with an ``id`` are anchors, those with an address are links."""
        found = {name: value for name, value in attrs if value}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        to = found.get("href") or found.get("src")
        if to:
            (self.links if tag == "a" else self.loads).append(to)


def problems(site: Path) -> list[str]:
    """One line for each link that leads nowhere, and for all that a page or a style would fetch from elsewhere."""
    pages = {path: Page(path) for path in site.rglob("*.html")}
    found = [f"{path.relative_to(site)}: {said}" for path, page in pages.items() for said in _of_page(path, pages)]
    for style in site.rglob("*.css"):
        found += [f"{style.relative_to(site)}: fetches {each}" for each in FETCHED.findall(style.read_text())]
    return sorted(set(found))


def _of_page(path: Path, pages: dict[Path, Page]) -> list[str]:
    page, found = pages[path], list[str]()
    for to in [*page.links, *page.loads]:
        parts = urlsplit(to)
        if parts.scheme in ("data", "mailto"):
            continue
        if parts.scheme or parts.netloc:
            found += [f"fetches {to}"] if to in page.loads else []
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if not target.exists():
            found.append(f"{to} is not there")
        elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
            found.append(f"{to} has no such anchor")
    return found
