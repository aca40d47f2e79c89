from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline import record
from paceline.errors import SettingError
from paceline.events import Ended, Event, Measured, Resumed
from paceline.records import GradientStats

from .fake import START, gossiped, started, step


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    files = EventAccumulator(str(folder))
    files.Reload()
    return {tag: [(point.step, point.value) for point in files.Scalars(tag)] for tag in files.Tags()["scalars"]}


def write(recorder: record.TensorBoard, *events: Event) -> None:
    for event in events:
        recorder.record(event)
    recorder.close()


# The files hold 32-bit floats, whose relative rounding error is at most 2^-24.
def near(value: float) -> object:
    return pytest.approx(value, rel=2**-23)


def test_gossip_has_curves(tmp_path: Path) -> None:
    write(record.TensorBoard(tmp_path, every_seconds=0), started(), gossiped(), step(0))
    found = curves(tmp_path)
    assert found["gossip/distance"] == [(64, 0.25)]
    assert found["gossip/members"] == [(64, 4)]
    assert "gossip/spread" not in found
    files = EventAccumulator(str(tmp_path))
    files.Reload()
    [kernel] = files.Tensors("gossip/kernel/text_summary")
    assert kernel.tensor_proto.string_val == [b"numba"]


def test_counts_of_gossip_are_those_since_the_last_point(tmp_path: Path) -> None:
    write(
        record.TensorBoard(tmp_path, every_seconds=1.0),
        *(gossiped(), step(0, time=START)),
        *(gossiped(), step(1, time=START + 0.2), gossiped(), step(2, time=START + 0.4)),
        *(gossiped(), step(3, time=START + 1.5)),
    )
    found = curves(tmp_path)
    assert found["gossip/exchanges"] == [(64, 3), (256, 9)]
    assert found["gossip/wider"] == [(64, 1), (256, 3)]
    assert found["gossip/bytes_sent"] == [(64, 4000), (256, 12_000)]
    assert found["gossip/distance"] == [(64, 0.25), (256, 0.25)]
    assert found["gossip/known"] == [(64, 5), (256, 5)]


def test_every_curve_is_over_examples(tmp_path: Path) -> None:
    stats = GradientStats(units=8, weight=64.0, variance=64.0, mean_sqnorm=3.0)
    write(
        record.TensorBoard(tmp_path, every_seconds=0),
        started(),
        step(0, loss=0.5, stats=stats),
        step(1, loss=0.25, stats=stats),
        Measured(START + 1, 2, {"test/accuracy": 0.75}),
    )
    assert curves(tmp_path) == {
        "train/loss": [(64, 0.5), (128, 0.25)],
        "train/learning_rate": [(64, near(0.1)), (128, near(0.1))],
        "train/batch": [(64, 64), (128, 64)],
        "speed/examples_per_second": [(64, near(6400)), (128, near(6400))],
        # Of the two workers' 20 ms, 2 ms went to waiting.
        "speed/waiting_share": [(64, near(0.1)), (128, near(0.1))],
        "speed/efficiency": [(64, near(0.8)), (128, near(0.8))],
        "share/worker_0": [(64, 48), (128, 48)],
        "share/worker_1": [(64, 16), (128, 16)],
        "gradient/variance": [(64, 64), (128, 64)],
        "gradient/signal": [(64, 2), (128, 2)],  # 3 - 64 / 64
        "gradient/noise_scale": [(64, 32), (128, 32)],
        "test/accuracy": [(128, 0.75)],
    }


def test_points_between_are_means(tmp_path: Path) -> None:
    first = GradientStats(units=8, weight=10.0, variance=10.0, mean_sqnorm=2.0)  # signal 1
    second = GradientStats(units=8, weight=30.0, variance=30.0, mean_sqnorm=4.0)  # signal 3
    write(
        record.TensorBoard(tmp_path, every_seconds=1.0),
        step(0, time=START, loss=9.0),
        step(1, time=START + 0.2, counts=[5, 5], examples=74, loss=1.0, seconds=0.1, stats=first),
        step(2, time=START + 0.9, counts=[15, 15], examples=104, loss=2.0, seconds=0.3, stats=second),
        Ended(START + 1, 3, 104, "done"),
    )
    found = curves(tmp_path)
    assert found["train/loss"] == [(64, 9.0), (104, near((10 * 1.0 + 30 * 2.0) / 40))]
    assert found["speed/examples_per_second"][1:] == [(104, near(40 / 0.4))]
    # The ratio of the weighted means, not the mean of the ratios.
    assert found["gradient/noise_scale"] == [(104, near((10 * 10 + 30 * 30) / (10 * 1 + 30 * 3)))]


def test_points_are_not_closer_than_asked(tmp_path: Path) -> None:
    steps = [step(number, seconds=0.125) for number in range(33)]  # exact in binary: four steps make half a second
    write(record.TensorBoard(tmp_path, every_seconds=0.5), *steps)
    assert [at for at, _ in curves(tmp_path)["train/loss"]] == [64 * (4 * point + 1) for point in range(9)]


def test_closing_writes_what_is_left(tmp_path: Path) -> None:
    write(record.TensorBoard(tmp_path, every_seconds=1.0), step(0), step(1), step(2))
    assert [at for at, _ in curves(tmp_path)["train/loss"]] == [64, 192]


def test_a_clock_that_was_set_back_does_not_silence_the_curves(tmp_path: Path) -> None:
    write(record.TensorBoard(tmp_path), step(0, time=START), step(1, time=START - 3600), step(2, time=START - 3590))
    assert [at for at, _ in curves(tmp_path)["train/loss"]] == [64, 128, 192]


def test_a_loss_that_is_no_number_is_shown(tmp_path: Path) -> None:
    write(record.TensorBoard(tmp_path), step(0, loss=math.nan))
    [(_, value)] = curves(tmp_path)["train/loss"]
    assert math.isnan(value)


def test_a_resumed_run_takes_back_what_was_lost(tmp_path: Path) -> None:
    write(record.TensorBoard(tmp_path, every_seconds=0), *[step(number, loss=1.0) for number in range(6)])
    for file in tmp_path.iterdir():  # TensorBoard reads in the order of the names, and they begin with the time
        file.rename(tmp_path / "events.out.tfevents.0000000001.earlier")
    write(
        record.TensorBoard(tmp_path, every_seconds=0),
        started(),
        Resumed(START, 3, "checkpoint", 2),
        step(3, loss=2.0),
        step(4, loss=2.0),
    )
    assert curves(tmp_path)["train/loss"] == [(64, 1), (128, 1), (192, 1), (256, 2), (320, 2)]


def test_an_event_after_close_is_kept(tmp_path: Path) -> None:
    recorder = record.TensorBoard(tmp_path, every_seconds=0)
    write(recorder, step(0))
    recorder.close()
    write(recorder, step(1))
    # Sorted, because the names of two files of one second do not tell which was first.
    assert sorted(at for at, _ in curves(tmp_path)["train/loss"]) == [64, 128]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match="cannot write TensorBoard files to"):
        record.TensorBoard(tmp_path / "file" / "tensorboard")


def test_a_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(SettingError, match=r"pip install 'paceline\[tensorboard\]'"):
        record.TensorBoard(tmp_path)


def test_importing_the_recorders_does_not_import_tensorboard() -> None:
    program = "import sys, paceline.record; sys.exit('tensorboard' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_full_disk_warns_once_and_the_run_goes_on(tmp_path: Path) -> None:
    program = """
import resource, sys
from paceline import record
from paceline.events import Measured
recorder = record.TensorBoard(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for number in range(2000):
    recorder.record(Measured(1.0, number, {"accuracy": 0.5}))
recorder.close()
print("trained to the end")
"""
    child = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert child.stdout == "trained to the end\n"
    assert child.stderr.count("cannot be written any more") == 1


def test_drift_has_a_curve_where_workers_train_apart(tmp_path: Path) -> None:
    write(record.TensorBoard(tmp_path, every_seconds=0), started(), step(3, steps=4, drift=0.5))
    assert curves(tmp_path)["train/drift"] == [(256, 0.5)]
