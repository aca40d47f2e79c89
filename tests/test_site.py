"""The site of the documents: it has every page, and is made without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from docs.site_check import problems

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MODULES = {"events", "recipes", "roles"}  # of the package itself, which documents speak of by these names
INSTALLED = importlib.util.find_spec("furo") is not None


def navigation() -> Counter[str]:
    return Counter(re.findall(r"^   ([\w/-]+)$", (DOCS / "index.rst").read_text(), re.MULTILINE))


def test_the_navigation_has_every_page_once() -> None:
    pages = [
        path.relative_to(DOCS).with_suffix("") for kind in ("*.md", "*.rst", "api/*.rst") for path in DOCS.glob(kind)
    ]
    assert navigation() == Counter(str(page) for page in pages if page.name != "index")


def test_the_reference_has_every_public_package() -> None:
    packages = {path.parent.name for path in (ROOT / "paceline").glob("*/__init__.py")} - {"cli"}
    pages = {path.stem: path.read_text() for path in DOCS.glob("api/*.rst")}
    assert pages.keys() == packages | MODULES | {"paceline"}
    for name, text in pages.items():
        module = name if name == "paceline" else f"paceline.{name}"
        assert text.startswith(f"{module}\n{'=' * len(module)}\n\n.. automodule:: {module}\n")


def test_what_is_wrong_with_a_site_is_found(tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text('<h1 id="top">x</h1><a href="https://elsewhere.org">y</a><a href="#top">z</a>')
    (tmp_path / "style.css").write_text("body { background: url(data:image/png;base64,AA==) }")
    assert problems(tmp_path) == []
    (tmp_path / "bad.html").write_text(
        '<a href="good.html#bottom">a</a><a href="gone.html">b</a><a href="#here">c</a>'
        '<script src="https://elsewhere.org/a.js"></script><link href="//elsewhere.org/a.css">'
    )
    (tmp_path / "style.css").write_text(
        '@import "https://elsewhere.org/b.css"; a { src: url("http://elsewhere.org/f") }'
    )
    assert problems(tmp_path) == [
        "bad.html: #here has no such anchor",
        "bad.html: fetches //elsewhere.org/a.css",
        "bad.html: fetches https://elsewhere.org/a.js",
        "bad.html: gone.html is not there",
        "bad.html: good.html#bottom has no such anchor",
        'style.css: fetches @import "https://elsewhere.org/b.css',
        'style.css: fetches url("http://elsewhere.org/f',
    ]


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="the extra `docs` is not installed; `make docs` installs it")
def test_the_site_is_made_without_a_warning(tmp_path: Path) -> None:
    """Its last part is that check of what was written."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-d", str(tmp_path / "trees"), str(DOCS)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(tmp_path / "site")], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    made = {path.relative_to(tmp_path / "site").with_suffix("") for path in (tmp_path / "site").rglob("*.html")}
    assert {Path(name) for name in navigation()} | {Path("index")} <= made
    assert "class paceline.sync.LocalSGD" in re.sub("<[^>]*>", "", (tmp_path / "site/api/sync.html").read_text())
