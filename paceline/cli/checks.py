"""What ``paceline doctor`` looks at: one function for each group of rows."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.filesize import decimal

from paceline.cli.exchange import all_reduce_seconds
from paceline.cli.launch import cores
from paceline.errors import DataMissing, FleetError
from paceline.lab.tools import missing
from paceline.tasks import cifar10, fashion_mnist, multi30k, sst2, tinyshakespeare
from paceline.tasks.files import data_folders, find

__all__ = ["Row", "rows"]


@dataclass(frozen=True)
class Row:
    """One thing that was looked at."""

    what: str
    ok: bool
    found: str
    """What there is, or how to get what is missing."""
    essential: bool = False
    """Whether nothing can be trained without it."""


def rows() -> Iterator[Row]:
    """All checks, one after the other; the slow one is the last."""
    yield from _software()
    yield from _machine()
    yield from _data()
    yield from _network()


def _software() -> Iterator[Row]:
    yield Row("Python", sys.version_info >= (3, 11), f"{platform.python_version()} ({sys.executable})", essential=True)
    yield Row("torch", True, str(torch.__version__), essential=True)
    for package, extra in {"scikit-learn": "tasks", "pillow": "tasks", "tensorboard": "tensorboard"}.items():
        try:
            yield Row(package, True, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Row(package, False, f"pip install 'paceline[{extra}]'")


def _machine() -> Iterator[Row]:
    yield Row("cores", True, str(cores()), essential=True)
    yield Row("memory", True, _memory())
    names = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    yield Row("GPUs", True, ", ".join(names) or "none that torch can use; training is on the CPU")
    runs = Path("runs").resolve()
    there = next(folder for folder in (runs, *runs.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    writable = os.access(there, os.W_OK)
    yield Row("disk", writable and free > 1e9, f"{decimal(free)} free for {runs}" + ("" if writable else ", read-only"))
    lacks = missing()
    yield Row("lab", not lacks, "; ".join(lacks) or "namespaces, shaped links and processor quotas work")


def _memory() -> str:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return decimal(pages * size)


def _data() -> Iterator[Row]:
    """Whether the files of the tasks are there; they are not read, which takes half a minute for some."""
    bundled = importlib.util.find_spec("sklearn") is not None
    yield Row("data: digits", bundled, "comes with scikit-learn" if bundled else "pip install 'paceline[tasks]'")
    for name, files, folders, remedy in (
        (
            "fashion-mnist",
            fashion_mnist.FILES,
            [*data_folders("fashion-mnist"), fashion_mnist.DEBIAN],
            fashion_mnist.REMEDY,
        ),
        ("cifar10", [cifar10.ARCHIVE], data_folders(), cifar10.REMEDY),
        ("sst2", sst2.FILES, data_folders("sst2"), sst2.REMEDY),
        ("tinyshakespeare", [tinyshakespeare.FILE], data_folders(), tinyshakespeare.REMEDY),
        ("multi30k", multi30k.FILES, data_folders("multi30k"), multi30k.REMEDY),
    ):
        try:
            yield Row(f"data: {name}", True, f"in {find(name, files, folders, remedy)[0].parent}")
        except DataMissing:
            yield Row(f"data: {name}", False, remedy)


def _network() -> Iterator[Row]:
    gloo = dist.is_available() and dist.is_gloo_available()
    yield Row("gloo", gloo, "between CPUs" if gloo else "this build of torch is without it: pip install torch", True)
    nccl = dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()
    yield Row("NCCL", True, "between GPUs" if nccl else "not needed without a GPU that torch can use")
    if gloo:
        try:
            seconds = all_reduce_seconds()
            yield Row("all-reduce", True, f"2 workers, 1 MB: {seconds * 1000:.1f} ms", essential=True)
        except FleetError as error:
            hint = "is a firewall on this machine, or GLOO_SOCKET_IFNAME set to another network?"
            yield Row("all-reduce", False, f"2 workers: {error}; {hint}", essential=True)
