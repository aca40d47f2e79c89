from __future__ import annotations

import copy
import errno
import io
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import lr_scheduler as schedulers

from paceline import checkpoint_file
from paceline.checkpoint import Checkpoint, clean, find, load_newest, parse, read, write
from paceline.errors import CheckpointError, SettingError

SMALL = {"step": 7, "weights": torch.arange(4.0)}


def same(a: Any, b: Any) -> bool:
    """Equal in value and in type, all the way down; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        # The bytes, so that NaNs and the signs of zeros count too.
        plain_a, plain_b = (x.to_dense().resolve_conj().contiguous() for x in (a, b))
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.layout == b.layout
            and plain_a.flatten().view(torch.uint8).equal(plain_b.flatten().view(torch.uint8))
        )
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


def there_and_back(folder: Path, tree: dict[str, Any]) -> dict[str, Any]:
    path = folder / "tree.ckpt"
    size = write(path, tree)
    assert size == path.stat().st_size
    return parse(read(path))


def parts(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.name.endswith(".part"))


scalars = (
    st.none()
    | st.booleans()
    | st.integers(1 - 2**2039, 2**2039 - 1)
    | st.floats()
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
)
keys = st.text() | st.integers() | st.booleans()
tensors = st.builds(
    lambda shape, dtype, seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(100).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]),
    st.integers(0, 99),
)
trees = st.dictionaries(
    st.text(),
    st.recursive(
        scalars | tensors,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.lists(inner, max_size=4).map(tuple)
            | st.dictionaries(keys, inner, max_size=4)
            | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
            | st.sets(keys, max_size=4)
        ),
        max_leaves=12,
    ),
    max_size=4,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(tree=trees)
def test_any_tree_comes_back_as_it_was(tree: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "trees"
    assert same(there_and_back(folder, tree), tree)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\x00\xff" * 500,
        bytearray(b"ab"),
        {1, "a"},
        Counter("abba"),
        torch.Size([2, 3]),
        torch.float16,
        torch.device("cpu"),
        2**2039 - 1,
        torch.eye(3).to_sparse(),
        torch.ones(2, 3).t(),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.zeros(0, 3),
        random.Random(3).getstate(),
        torch.get_rng_state(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_less_common_values_come_back(tmp_path: Path, value: Any) -> None:
    assert same(there_and_back(tmp_path, {"value": value})["value"], value)


def test_a_defaultdict_comes_back_as_a_dict(tmp_path: Path) -> None:
    assert same(there_and_back(tmp_path, {"a": defaultdict(list, {1: [2]})}), {"a": {1: [2]}})


def test_parameters_come_back_as_plain_tensors(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.note = lambda: None  # type: ignore[attr-defined]  # as some libraries set, and pickle refuses
    back = there_and_back(tmp_path, {"p": parameter, "loss": parameter.sum()})
    assert same(back, {"p": torch.ones(2), "loss": torch.tensor(2.0)})
    assert not back["p"].requires_grad


def test_a_slice_does_not_drag_its_storage_along(tmp_path: Path) -> None:
    big = torch.arange(1_000_000.0)
    path = tmp_path / "slice.ckpt"
    assert write(path, {"slice": big[10:20]}) < 10_000
    assert same(parse(read(path))["slice"], big[10:20].clone())


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    weight = torch.zeros(10_000)
    assert write(tmp_path / "tied.ckpt", {"a": weight, "b": weight.view(100, 100)}) < 60_000


def linear(cls: Callable[..., torch.optim.Optimizer], **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    return model, cls(model.parameters(), lr=0.1, **options)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    x = torch.arange(15.0).reshape(5, 3) / 15

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (model(x) - 1).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(steps):
        optimizer.step(closure)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"momentum": 0.5}),
        (torch.optim.LBFGS, {"max_iter": 3}),
    ],
)
def test_models_and_optimizers_go_on_as_if_nothing_happened(
    tmp_path: Path, cls: Callable[..., torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    model, optimizer = linear(cls, **options)
    train(model, optimizer)
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    back = there_and_back(tmp_path, tree)
    assert same(back, tree)
    assert back["model"]._metadata == model.state_dict()._metadata

    other, other_optimizer = linear(cls, **options)
    other.load_state_dict(back["model"])
    other_optimizer.load_state_dict(back["optimizer"])
    train(model, optimizer)
    train(other, other_optimizer)
    assert same(other.state_dict(), model.state_dict())


class Decay:
    """A schedule with a state, which LambdaLR saves as a dict."""

    def __init__(self) -> None:
        self.rate = 0.9

    def __call__(self, epoch: int) -> float:
        return self.rate**epoch


def sequential(optimizer: torch.optim.Optimizer) -> schedulers.LRScheduler:
    parts: list[schedulers.LRScheduler] = [
        schedulers.ConstantLR(optimizer, total_iters=2),
        schedulers.ExponentialLR(optimizer, gamma=0.9),
    ]
    return schedulers.SequentialLR(optimizer, parts, milestones=[2])


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda o: schedulers.StepLR(o, 2), id="StepLR"),
        pytest.param(lambda o: schedulers.MultiStepLR(o, [1, 2, 2, 5]), id="MultiStepLR"),
        pytest.param(lambda o: schedulers.CosineAnnealingLR(o, 10), id="CosineAnnealingLR"),
        pytest.param(lambda o: schedulers.OneCycleLR(o, 0.5, total_steps=20), id="OneCycleLR"),
        pytest.param(lambda o: schedulers.CyclicLR(o, 0.01, 0.1), id="CyclicLR"),
        pytest.param(lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch), id="LambdaLR"),
        pytest.param(lambda o: schedulers.LambdaLR(o, Decay()), id="LambdaLR with a state"),
        pytest.param(lambda o: schedulers.ReduceLROnPlateau(o, patience=0), id="ReduceLROnPlateau"),
        pytest.param(sequential, id="SequentialLR"),
        pytest.param(
            lambda o: schedulers.ChainedScheduler([schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.9)]),
            id="ChainedScheduler",
        ),
    ],
)
def test_schedulers_come_back(tmp_path: Path, make: Callable[[torch.optim.Optimizer], Any]) -> None:
    def advance(scheduler: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        rates = []
        for _ in range(4):
            optimizer.step()
            with warnings.catch_warnings():
                # SequentialLR itself calls its parts in the way that it warns of.
                warnings.simplefilter("ignore")
                scheduler.step(1.0) if isinstance(scheduler, schedulers.ReduceLROnPlateau) else scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    _, optimizer = linear(torch.optim.SGD, momentum=0.9)
    scheduler = make(optimizer)
    advance(scheduler, optimizer)
    tree = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    back = there_and_back(tmp_path, tree)
    assert same(back, tree)

    _, other = linear(torch.optim.SGD, momentum=0.9)
    resumed = make(other)
    other.load_state_dict(back["optimizer"])
    resumed.load_state_dict(back["scheduler"])
    assert advance(resumed, other) == advance(scheduler, optimizer)


def test_the_state_of_a_grad_scaler_comes_back(tmp_path: Path) -> None:
    model, optimizer = linear(torch.optim.SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=1)
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    state = scaler.state_dict()
    assert state["scale"] == 2.0**5
    assert same(there_and_back(tmp_path, {"scaler": state}), {"scaler": state})


class Subclass(Tensor):
    pass


def nested(depth: int) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for _ in range(depth):
        tree = {"in": tree}
    return tree


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"scheduler": {"lr_lambdas": [lambda: 1]}}, r"scheduler\.lr_lambdas\[0\] is a function.*state_dict"),
        ({"a": [1, {"b.c": np.float64(1)}]}, r"a\[1\]\['b\.c'\] is a numpy\.float64.*value\.item\(\)"),
        ({"a": {3: (np.ones(2),)}}, r"a\[3\]\[0\] is a numpy\.ndarray.*torch\.from_numpy"),
        ({"a": np.int64(3)}, r"a is a numpy\.int64"),
        ({"a": frozenset([1])}, r"a is a frozenset"),
        ({"a": Path("b")}, r"a is a pathlib\.PosixPath"),
        ({"a": errno}, r"a is a module"),
        ({"a": signal.SIGTERM}, r"a is a signal\.Signals"),
        ({"a": {(1, 2): 3}}, r"a has a tuple as a key"),
        ({"a": {np.int64(1): 3}}, r"a has a numpy\.int64 as a key"),
        ({"a": {b"b"}}, r"a has a bytes as a key or member"),
        ({"a": 2**2040}, r"a is an int of 2,041 bits"),
        ({"a": torch.ones(2).as_subclass(Subclass)}, r"a is a .*Subclass"),
        ({"a": torch.ones(2, device="meta")}, r"a is a tensor of the kind meta"),
        ({"a": nested(100)}, r"nested too deep"),
        ([1, 2], r"is a dict, not a list"),
        (Path("b"), r"is a dict, not a pathlib"),
    ],
)
def test_what_would_not_load_is_refused_before_a_byte_is_written(tmp_path: Path, tree: Any, message: str) -> None:
    path = tmp_path / "new" / "a.ckpt"
    with pytest.raises(CheckpointError, match=message):
        write(path, tree)
    assert not path.parent.exists()


def test_a_tree_that_contains_itself_is_refused(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"a": [1]}
    tree["a"].append(tree)
    with pytest.raises(CheckpointError, match="contains itself"):
        write(tmp_path / "a.ckpt", tree)


def test_the_deepest_tree_that_is_taken_loads(tmp_path: Path) -> None:
    tree = {"a": nested(99)}
    assert same(there_and_back(tmp_path, tree), tree)


def test_what_torch_refuses_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write(path, SMALL)
    number = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(CheckpointError, match=r"a\.ckpt: torch\.save refused .* different types"):
        write(path, {"complex": number, "real": torch.view_as_real(number)})
    assert same(parse(read(path)), SMALL)
    assert parts(tmp_path) == []


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    size = write(path, SMALL)
    for length in reversed(range(size)):
        os.truncate(path, length)
        with pytest.raises(CheckpointError, match=f"is cut short: {length:,} of .* bytes; use an earlier"):
            read(path)


def test_every_altered_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write(path, SMALL)
    whole = path.read_bytes()
    rng = random.Random(0)
    with open(path, "r+b", buffering=0) as file:
        for at, byte in enumerate(whole):
            os.pwrite(file.fileno(), bytes([byte ^ rng.randrange(1, 256)]), at)
            with pytest.raises(CheckpointError, match=r"a\.ckpt"):
                read(path)
            os.pwrite(file.fileno(), bytes([byte]), at)
    assert same(parse(read(path)), SMALL)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    size = write(path, SMALL)
    whole = path.read_bytes()

    path.write_bytes(whole[:1000])
    with pytest.raises(CheckpointError, match=rf"a\.ckpt is cut short: 1,000 of {size:,} bytes"):
        read(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match=r"a\.ckpt is too long"):
        read(path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"a\.ckpt does not match its digest"):
        read(path)
    path.write_bytes(whole[:16] + (3).to_bytes(8, "little") + whole[24:])
    with pytest.raises(CheckpointError, match=r"format 3, and this Paceline reads format 2; use the version"):
        read(path)
    torch.save(SMALL, path)
    with pytest.raises(CheckpointError, match=r"a\.ckpt is not a Paceline checkpoint"):
        read(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"a\.ckpt is cut short: 0 of at least"):
        read(path)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*b\.ckpt"):
        read(tmp_path / "b.ckpt")
    with pytest.raises(CheckpointError, match=r"is a folder, not a checkpoint"):
        read(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot read .* \(ENOTDIR\)"):
        read(path / "c.ckpt")


def saved(tree: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (saved({"a": os.getcwd}), "reads: .* GLOBAL posix.getcwd whose module posix is blocked"),
        (saved({"a": defaultdict(list)}), "reads: .* GLOBAL collections.defaultdict was not an allowed"),
        (saved([1]), "holds a list instead of a dict"),
        (b"", "not made of plain values"),
        (b"x" * 5000, "reads: Unsupported operand 120;"),
        (saved(SMALL)[:-9], "not made of plain values"),
    ],
)
def test_a_payload_that_is_no_tree_is_refused(payload: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        parse(payload)
    assert "weights_only" not in str(caught.value)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process can grow beyond ``size``; Python ignores the signal, so that writing fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_cannot_grow(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write(path, SMALL)
    tree = {"a": torch.zeros(30_000), "b": list(range(5_000)), "c": torch.zeros(9)}
    whole = write(tmp_path / "whole.ckpt", tree)
    # The last bytes are only written by the flush at the end, the first ones as soon as the buffer is full.
    for size in [0, 1, 71, 72, 73, *range(5_000, whole, 9_973), whole - 1]:
        with largest_file(size), pytest.raises(CheckpointError, match=r"a\.ckpt: File too large \(EFBIG\); free some"):
            write(path, tree)
        assert parts(tmp_path) == []
        assert same(parse(read(path)), SMALL)
    with largest_file(whole):
        write(path, tree)


def test_an_interrupt_while_writing_arrives_as_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.ckpt"
    write(path, SMALL)
    calls = 0

    class Interrupted(io.BufferedWriter):
        def write(self, data: Any) -> int:
            nonlocal calls
            calls += 1
            if calls == 9:
                raise KeyboardInterrupt
            return super().write(data)

    def interrupted(path: Path, mode: str) -> Any:
        return Interrupted(io.FileIO(path, mode)) if mode == "xb" else open(path, mode)

    monkeypatch.setattr(checkpoint_file, "open", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        write(path, SMALL)
    assert parts(tmp_path) == []
    assert same(parse(read(path)), SMALL)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("only root can mount a disk")
    command = [mount, "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a disk here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    policy = Checkpoint(small_disk / "run", every=1)
    write(policy.path(1), SMALL)
    with pytest.raises(CheckpointError, match=r"step-00000002\.ckpt: No space left on device \(ENOSPC\); free some"):
        write(policy.path(2), {"weights": torch.zeros(100_000)})
    assert [file.name for file in policy.folder.iterdir()] == ["step-00000001.ckpt"]
    write(policy.path(3), {"weights": torch.zeros(40_000)})
    with pytest.raises(CheckpointError, match="ENOSPC"):
        write(policy.path(3), {"weights": torch.ones(40_000)})
    assert same(parse(read(policy.path(3))), {"weights": torch.zeros(40_000)})
    assert same(parse(read(policy.path(1))), SMALL)


def test_a_read_only_disk(small_disk: Path) -> None:
    policy = Checkpoint(small_disk, keep=1)
    write(policy.path(1), SMALL)
    write(policy.path(2), SMALL)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for path in (policy.path(2), small_disk / "new" / "a.ckpt"):
        with pytest.raises(CheckpointError, match=r"Read-only file system \(EROFS\); give a file name in a folder"):
            write(path, SMALL)
    with pytest.raises(CheckpointError, match=r"cannot remove old checkpoints .* \(EROFS\)"):
        policy.prune()
    assert same(parse(load_newest(small_disk)[1]), SMALL)


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    with pytest.raises(CheckpointError, match=r"cannot save .* \((EEXIST|ENOTDIR)\)"):
        write(file / "a.ckpt", SMALL)
    with pytest.raises(CheckpointError, match=r"cannot save .* \(ENOTDIR\)"):
        write(file / "deeper" / "a.ckpt", SMALL)
    assert file.read_text() == "not a folder"


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").mkdir()
    with pytest.raises(CheckpointError, match=r"a\.ckpt: Is a directory \(EISDIR\)"):
        write(tmp_path / "a.ckpt", SMALL)
    assert parts(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match=r"\(EACCES\)"):
            write(tmp_path / "a.ckpt", SMALL)
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize(("number", "fails"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_file_system_without_fsync_of_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fails: bool
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    if fails:
        with pytest.raises(CheckpointError, match="EIO"):
            write(tmp_path / "a.ckpt", SMALL)
    else:
        write(tmp_path / "a.ckpt", SMALL)
    assert same(parse(read(tmp_path / "a.ckpt")), SMALL)


def made(step: int) -> dict[str, Any]:
    """What the writers below save after a step. Large enough that most kills hit in the middle of a file."""
    return {"step": step, "weights": torch.full((100_000,), step), "more": [torch.full((9,), step + 0.5)] * 99}


def serve() -> None:
    """Start one writer after another, each by a line on stdin, and tell when it has ended.

    One process that forks, because importing torch anew for every writer would take most of the time of the tests.
    """
    torch.set_num_threads(1)
    parent = os.getpid()
    for line in sys.stdin:
        how, size, first, folder = line.rstrip("\n").split(" ", 3)
        child = os.fork()
        if child == 0:
            die(how, int(size))
            step = int(first)
            while os.getppid() == parent:
                write(Checkpoint(folder).path(step), made(step))
                say("wrote", step)
                step += 1
            os._exit(0)
        say("started", child)
        os.waitpid(child, 0)
        say("ended", child)


def say(word: str, number: int) -> None:
    # In one call, so that a kill leaves a whole line or none; print makes several.
    os.write(1, f"{word} {number}\n".encode())


def die(how: str, size: int) -> None:
    """Arrange for this process to be killed where a file reaches ``size``, or in a call of ``os``."""

    def kill(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if how == "size":
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    elif how != "outside":
        setattr(os, how, kill)


class Writers:
    """The other end of :func:`serve`."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.written: list[int] = []

    def start(self, folder: Path, first: int, how: str = "outside", size: int = 0) -> int:
        """Give the process of a writer that begins with step ``first``."""
        self.stdin.write(f"{how} {size} {first} {folder}\n")
        self.stdin.flush()
        self.written = []
        return self.listen("started")

    def listen(self, awaited: str) -> int:
        """Hear what the writer wrote until the awaited word comes, and give its number."""
        while True:
            word, number = self.stdout.readline().split()
            if word == "wrote":
                self.written.append(int(number))
            if word == awaited:
                return int(number)
            assert word != "ended", f"the writer ended by itself after {self.written}"

    def close(self) -> None:
        self.stdin.close()
        self.process.wait(timeout=20)
        self.stdout.close()


@pytest.fixture(scope="module")
def writers() -> Iterator[Writers]:
    writers = Writers()
    yield writers
    writers.close()


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint, which must be whole: a warning would be an error."""
    path, payload = load_newest(folder)
    step = int(path.stem.removeprefix("step-"))
    assert same(parse(payload), parse(saved(made(step))))
    return step


def test_kills_at_any_time_leave_what_was_written(tmp_path: Path, writers: Writers) -> None:
    rng = random.Random(0)
    step = 0
    hit = 0
    for _ in range(12):
        child = writers.start(tmp_path, step + 1)
        try:
            if not writers.written:
                writers.listen("wrote")
            time.sleep(rng.uniform(0, 0.05))
        finally:
            os.kill(child, signal.SIGKILL)
        writers.listen("ended")
        assert len(parts(tmp_path)) <= 1
        hit += len(parts(tmp_path))
        step = newest_step(tmp_path)
        # Killed between the new name and the word of it, there is one more than was said.
        assert step in (writers.written[-1], writers.written[-1] + 1)
        Checkpoint(tmp_path).prune()
    assert hit > 0, "no kill hit in the middle of a file"
    write(Checkpoint(tmp_path).path(step + 1), made(step + 1))
    assert parts(tmp_path) == []
    assert newest_step(tmp_path) == step + 1


def test_kills_at_every_part_of_the_work(tmp_path: Path, writers: Writers) -> None:
    whole = write(Checkpoint(tmp_path).path(1), made(1))
    ways = [("size", size) for size in (0, 1, 71, 72, 5_000, whole // 2, whole - 1)]
    for how, size in [*ways, ("fsync", 0), ("replace", 0)]:
        child = writers.start(tmp_path, 2, how, size)
        writers.listen("ended")
        assert writers.written == []
        part = tmp_path / f".step-00000002.ckpt.{child}.part"
        assert parts(tmp_path) == [part.name]
        assert newest_step(tmp_path) == 1
        if how != "size":  # all was handed over before it was asked to last, or to take its name
            assert parse(read(part))["step"] == 2
    clean(tmp_path)
    assert parts(tmp_path) == []


def test_temporary_files_of_living_processes_stay(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    ours, parent = tmp_path / f".a.{os.getpid()}.part", tmp_path / f".a.{os.getppid()}.part"
    others = [tmp_path / "a.1.part", tmp_path / ".a.part", tmp_path / ".a.1x.part", tmp_path / ".a.1.part.txt"]
    gone = tmp_path / f".a.{ended.pid}.part"
    for file in [ours, parent, gone, tmp_path / f".a.{10**30}.part", *others]:
        file.touch()
    clean(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([parent, *others])


def steps(files: Iterator[Path] | list[Path]) -> list[int]:
    return [int(file.stem.removeprefix("step-")) for file in files]


def test_names_and_order(tmp_path: Path) -> None:
    policy = Checkpoint(tmp_path / "run")
    assert policy.newest() == []
    policy.prune()
    assert policy.path(120) == tmp_path / "run" / "step-00000120.ckpt"
    for step in (99_999_999, 100_000_000, 100_000_001):
        write(policy.path(step), {})
    (policy.folder / "best.ckpt").touch()
    (policy.folder / "step-1.ckpt").touch()
    assert steps(policy.newest()) == steps(find(policy.folder)) == [100_000_001, 100_000_000, 99_999_999]
    assert list(find(policy.path(99_999_999))) == [policy.path(99_999_999)]


def test_the_newest_is_the_last_written(tmp_path: Path) -> None:
    policy = Checkpoint(tmp_path, keep=2)
    for step in (100, 200, 300, 110):  # 110: the run went back to 100, and on from there
        write(policy.path(step), {"step": step})
        os.utime(policy.path(step), (1e9 - step, 1e9 - step))  # copies have times of their own
    assert steps(policy.newest()) == [110, 300, 200, 100]
    policy.prune()
    assert steps(policy.newest()) == [110, 300]
    write(policy.path(300), {})
    assert steps(policy.newest()) == [300, 110]


def test_prune_keeps_the_newest_and_what_is_not_ours(tmp_path: Path) -> None:
    policy = Checkpoint(tmp_path, keep=3)
    for step in range(1, 6):
        write(policy.path(step), {})
    policy.path(9).write_text("somebody else's")
    other = tmp_path / "best.ckpt"
    write(other, {})
    policy.prune()
    assert steps(policy.newest()) == [9, 5, 4, 3]
    assert other.exists()


def test_a_damaged_serial_number_cannot_stop_the_next(tmp_path: Path) -> None:
    policy = Checkpoint(tmp_path, keep=1)
    write(policy.path(1), {})
    whole = policy.path(1).read_bytes()
    policy.path(1).write_bytes(whole[:24] + b"\xff" * 8 + whole[32:])
    write(policy.path(2), SMALL)
    policy.prune()
    with pytest.warns(UserWarning, match=r"step-00000001\.ckpt does not match its digest"):
        assert load_newest(tmp_path)[0] == policy.path(2)


def test_a_damaged_newer_one_gives_a_warning(tmp_path: Path) -> None:
    policy = Checkpoint(tmp_path)
    for step in (1, 2, 3, 4):
        write(policy.path(step), {"step": step})
    assert load_newest(tmp_path) == (policy.path(4), read(policy.path(4)))
    os.truncate(policy.path(4), 1000)
    policy.path(3).write_bytes(b"")
    with pytest.warns(UserWarning, match=r"step-0000000\d\.ckpt is cut short.*Going on from .*00002") as warned:
        path, payload = load_newest(tmp_path)
    assert len(warned) == 2
    assert {"00000003" in str(warning.message) for warning in warned} == {True, False}
    assert path == policy.path(2)
    assert parse(payload) == {"step": 2}
    with pytest.raises(CheckpointError, match=r"step-00000004\.ckpt is cut short"):
        load_newest(policy.path(4))


def test_none_that_is_sound(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load_newest(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        load_newest(tmp_path / "nowhere")
    policy = Checkpoint(tmp_path)
    for step in (1, 2):
        write(policy.path(step), SMALL)
    os.truncate(policy.path(1), 100)
    policy.path(2).write_bytes(b"something else entirely")
    with pytest.raises(CheckpointError) as caught:
        load_newest(tmp_path)
    assert "00000001.ckpt is cut short: 100 of" in str(caught.value)
    assert "00000002.ckpt is not a Paceline checkpoint" in str(caught.value)


def test_due_by_steps() -> None:
    policy = Checkpoint("somewhere", every=3)
    assert [step for step in range(10) if policy.due(step, now=step * 1e6)] == [3, 6, 9]


def test_due_by_time() -> None:
    policy = Checkpoint("somewhere", seconds=10)
    policy.mark(100.0)
    assert [now for now in (100.0, 109.0, 110.0, 150.0) if policy.due(1, now)] == [110.0, 150.0]
    policy.mark(150.0)
    assert not policy.due(1, 159.0)
    assert policy.due(1, 160.0)


def test_time_counts_from_the_first_question_at_the_latest() -> None:
    policy = Checkpoint("somewhere", seconds=10)
    assert not policy.due(1, 1000.0)
    assert policy.due(2, 1010.0)


def test_due_by_either_or_never() -> None:
    both = Checkpoint("somewhere", every=5, seconds=10)
    both.mark(0.0)
    assert [both.due(step, now) for step, now in ((5, 1.0), (6, 2.0), (6, 10.0))] == [True, False, True]
    assert not any(Checkpoint("somewhere").due(step, now=step * 1e6) for step in range(10))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, r"keep \(0\) is not a whole number of at least 1"),
        ({"keep": None}, r"keep \(None\)"),
        ({"every": 0}, r"every \(0\)"),
        ({"every": 2.5}, r"every \(2\.5\)"),
        ({"every": True}, r"every \(True\)"),
        ({"seconds": 0}, r"seconds \(0\) is not a number above 0"),
        ({"seconds": math.nan}, r"seconds \(nan\)"),
        ({"seconds": math.inf}, r"seconds \(inf\)"),
        ({"seconds": "10"}, r"seconds \('10'\)"),
    ],
)
def test_settings_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Checkpoint("somewhere", **options)


def test_a_policy_shows_its_settings() -> None:
    assert repr(Checkpoint("a", every=5)) == "Checkpoint('a', every=5, seconds=None, keep=3)"


def test_state_is_not_changed_by_writing(tmp_path: Path) -> None:
    tree = {"a": OrderedDict(b=torch.ones(2)), "c": defaultdict(list, {1: [b""]}), "d": {1, 2}}
    before = copy.deepcopy(tree)
    write(tmp_path / "a.ckpt", tree)
    assert same(tree, before)


if __name__ == "__main__":
    serve()
    os._exit(0)  # torch takes a second to leave
