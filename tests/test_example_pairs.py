"""The pairs of examples beyond images: both scripts train the same model, and the table counts what differs."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from tests.pool import Pool
from tests.tasks import test_multi30k, test_sst2
from tests.test_examples import EXAMPLES, play, results

PAIRS = sorted(folder.name for folder in EXAMPLES.iterdir() if (folder / "train.py").exists())
PAGE = (EXAMPLES.parent / "docs" / "examples.md").read_text()
REVIEWS = [("a fine film", 1), ("a dull film", 0), ("fine acting , fine music", 1), ("dull and slow", 0)] * 32
CAPTIONS = [("A dog.", "Ein Hund."), ("A small house.", "Ein kleines Haus."), ("A man.", "Ein Mann.")] * 43
NEEDS = {"fabric": "lightning_fabric", "hugging_face": "transformers"}
QUICK = ("--epochs", "1", "--limit", "128")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small files of all texts."""
    folder = tmp_path_factory.mktemp("texts")
    test_sst2.write(folder, REVIEWS, REVIEWS[:8])
    test_multi30k.write(folder, CAPTIONS, CAPTIONS[:6])
    (folder / "tinyshakespeare.txt").write_text("To be, or not to be, that is the question. " * 250)
    return folder


@pytest.mark.parametrize("pair", ["tinyshakespeare", "multi30k", "hugging_face", "fabric"])
def test_both_scripts_of_a_pair_train_the_same_model(pool: Pool, texts: Path, pair: str) -> None:
    if pair in NEEDS:
        pytest.importorskip(NEEDS[pair], reason="pip install 'paceline[examples]'")
    by_torch, silent = pool.run(2, play, f"{pair}/train_torch.py", texts, *QUICK)
    by_paceline, also_silent = pool.run(2, play, f"{pair}/train.py", texts, *QUICK)
    assert silent == also_silent == ""
    # Sums are rounded in another order; the scripts print four digits.
    assert results(by_paceline)[1] == pytest.approx(results(by_torch)[1], abs=0.002)


def test_an_adaptive_batch_takes_fewer_steps(pool: Pool, texts: Path) -> None:
    by_torch, _ = pool.run(2, play, "sst2/train_torch.py", texts, "--epochs", "4", "--limit", "128")
    by_paceline, _ = pool.run(2, play, "sst2/train.py", texts, "--epochs", "4", "--limit", "128")
    for printed in (by_torch, by_paceline):
        assert float(re.findall(r"test accuracy (\d\.\d{4})", printed)[0]) > 0.9
    [(steps, size)] = re.findall(r"(\d+) steps of (\d+) examples", by_paceline)
    assert int(steps) * int(size) == pytest.approx(4 * 128, rel=0.05)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_table_counts_what_differs(pair: str) -> None:
    before, after = ((EXAMPLES / pair / name).read_text().splitlines() for name in ("train_torch.py", "train.py"))
    lines = list(difflib.ndiff(before, after))
    added, removed = (sum(line.startswith(sign) for line in lines) for sign in ("+ ", "- "))
    row = rf"\| \[{pair}\]\(\.\./examples/{pair}/train\.py\) \|.*\| \+{added} −{removed} \|"
    assert re.search(row, PAGE), f"docs/examples.md should tell of {pair}: +{added} −{removed}"
