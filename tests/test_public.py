"""What is public is listed, documented and mentioned; what is optional is not imported."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import paceline as pl

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "paceline"


def public_modules() -> list[str]:
    found = (module.name for module in pkgutil.walk_packages(pl.__path__, "paceline."))
    return ["paceline", *(name for name in found if not any(part.startswith("_") for part in name.split(".")))]


MODULES = public_modules()


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def group(name: str) -> int:
    """Constants first, then classes, then the rest: the order that ruff (RUF022) keeps."""
    return 0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2


def test_all_modules_are_found() -> None:
    assert {"paceline.run", "paceline.sync.all_reduce", "paceline.cli.demo"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_all_is_there_sorted_and_without_duplicates(name: str) -> None:
    listed = load(name).__all__
    assert list(listed) == sorted(set(listed), key=lambda one: (group(one), one))
    for one in listed:
        assert hasattr(load(name), one), f"{name}.__all__ lists {one}, which is not there"


@pytest.mark.parametrize("name", MODULES)
def test_everything_public_has_a_docstring(name: str) -> None:
    module = load(name)
    assert module.__doc__, f"{name} has no docstring"
    bare = [f"{name}.{one}" for one in module.__all__ for one in undocumented(one, getattr(module, one))]
    assert not bare, f"without a docstring: {', '.join(bare)}"


def undocumented(name: str, thing: Any) -> Iterator[str]:
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return
    written = thing.__dict__.get("__doc__") if inspect.isclass(thing) else thing.__doc__
    # A dataclass without a docstring gets its signature as one.
    if not written or written.startswith(f"{getattr(thing, '__name__', name)}("):
        yield name
    if not inspect.isclass(thing):
        return
    for key, member in vars(thing).items():
        is_method = inspect.isroutine(member) or isinstance(member, property)
        if is_method and not key.startswith("_") and not member.__doc__:
            yield f"{name}.{key}"


def test_the_check_for_docstrings_can_fail() -> None:
    class Bare:
        def method(self) -> None:
            pass

        @property
        def number(self) -> int:
            return 0

        @classmethod
        def make(cls) -> None:
            pass

        def _private(self) -> None:
            pass

    assert list(undocumented("Bare", Bare)) == ["Bare", "Bare.method", "Bare.number", "Bare.make"]
    assert list(undocumented("f", lambda: None)) == ["f"]
    assert list(undocumented("number", 5)) == []


ROLES = ("balance", "batch", "codec", "lr", "order", "probe", "record", "sync")


def mentioned() -> list[str]:
    """The names that the documents have to speak of."""
    in_roles = (load(f"paceline.{role}") for role in ROLES)
    classes = [one for module in in_roles for one in module.__all__ if inspect.isclass(getattr(module, one))]
    return sorted({*pl.__all__, *classes})


def test_every_public_name_is_in_the_documents() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    missing = [name for name in mentioned() if not re.search(rf"\b{name}\b", text)]
    assert not missing, f"no document speaks of {', '.join(missing)}"


def test_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


def test_the_file_that_knows_all_roles_stays_small() -> None:
    assert len((PACKAGE / "run.py").read_text().splitlines()) < 300


def test_optional_packages_are_not_imported() -> None:
    """Somebody without them can train, and nobody waits for their import."""
    code = "import sys, paceline; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    imported = done.stdout
    assert "'torch'" in imported
    for package in ("sklearn", "tensorboard", "PIL"):
        assert f"'{package}'" not in imported


UNPICKLES = re.compile(
    r"^\s*(?:import|from) (?:pickle|cloudpickle|dill|marshal|shelve)\b"
    r"|torch\.load\((?!.*weights_only=True)|np\.load\((?!.*allow_pickle=False)"
    r"|\b(?:all_gather|gather|broadcast|scatter|send|recv)_object",
    re.MULTILINE,
)


def test_nothing_from_outside_is_unpickled() -> None:
    """The processes of ``paceline.testing`` start each other; nothing else in the package reads a pickle."""
    read = {path: path.read_text() for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE / "testing"}
    assert [path.name for path, text in read.items() if UNPICKLES.search(text)] == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "    from cloudpickle import loads",
        "torch.load(file)",
        "np.load(file, mmap_mode='c')",
        "dist.all_gather_object(found, own)",
    ],
)
def test_the_check_for_pickles_can_fail(line: str) -> None:
    assert UNPICKLES.search(line)


def test_the_version_is_in_the_changelog() -> None:
    assert f"## [{pl.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
