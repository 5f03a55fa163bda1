"""Rows of prepared tokens: an order that the seed and a row's number determine."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from configurator import UserError
from text.rows import TokenRows, load_meta

META = {"vocab_size": 70000, "dtype": "uint16", "tokens": {}}


def test_rows_are_a_permutation_each_epoch_and_the_same_for_any_start(tmp_path):
    np.arange(1000, dtype="<u2").tofile(tmp_path / "x.bin")
    rows = TokenRows(tmp_path / "x.bin", META, 32, seed=1)
    first = [rows.start(n) for n in range(rows.n_rows)]
    second = [rows.start(n) for n in range(rows.n_rows, 2 * rows.n_rows)]
    assert len(set(first)) == rows.n_rows == len(set(second)) and first != second
    assert TokenRows(tmp_path / "x.bin", META, 32, seed=1).start(40) == second[40 - rows.n_rows]
    x, y = rows.batch(0, 3, "cpu")
    assert torch.equal(x[:, 1:], y[:, :-1]) and x[:, 0].tolist() == first[:3]


def test_exactly_one_window_is_enough(tmp_path):
    for n in (33, 32, 34):
        np.arange(n, dtype="<u2").tofile(tmp_path / f"{n}.bin")
    x, y = TokenRows(tmp_path / "33.bin", META, 32, seed=0).batch(0, 1, "cpu")
    assert x[0].tolist() == list(range(32)) and y[0].tolist() == list(range(1, 33))
    with pytest.raises(UserError, match="32 tokens.*33"):
        TokenRows(tmp_path / "32.bin", META, 32, seed=0)
    rows = TokenRows(tmp_path / "34.bin", META, 32, seed=0)
    assert {rows.start(n) for n in range(200)} == {0, 1}


def test_reading_batches_does_not_grow_memory(tmp_path):
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("no /proc here")

    def anonymous():
        line = next(x for x in status.read_text().splitlines() if x.startswith("RssAnon"))
        return int(line.split()[1]) / 1024

    np.arange(10_000_000, dtype="<u4").tofile(tmp_path / "train.bin")
    meta = {"vocab_size": 2 ** 31, "dtype": "uint32", "tokens": {}}
    rows = TokenRows(tmp_path / "train.bin", meta, 1024, seed=0)
    rows.batch(0, 8, "cpu")
    before = anonymous()
    for n in range(1000):
        rows.batch(8 * n, 8, "cpu")
    assert anonymous() - before < 10


def test_reading_a_data_set_prepares_none(tmp_path, monkeypatch):
    """Only train.py does: a picture or a score of a data set that is not there is a mistake."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no such file.*python prepare_data.py\)"):
        load_meta("python")
    assert not list(tmp_path.iterdir())


def test_a_data_set_is_called_by_its_folders_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data/mine").mkdir(parents=True)
    Path("data/mine/meta.json").write_text("{}")
    Path("other").mkdir()
    Path("other/meta.json").write_text("{}")
    for name, here in (("data/mine", "mine"), ("other", str(tmp_path / "other"))):
        with pytest.raises(UserError, match=f"dataset={name}: the name .*; here {here}$"):
            load_meta(name)


@pytest.mark.parametrize("change", [{"dtype": "V0"}, {"dtype": "float16"}, {"dtype": "int16"},
                                    {"dtype": "uint7"}, {"tokens": None}, {"vocab_size": "9"}])
def test_meta_data_that_mean_no_ids_are_damaged(tmp_path, monkeypatch, change):
    monkeypatch.chdir(tmp_path)
    meta = {"tokenizer": "bytes", "vocab_size": 257, "eos_id": 256, "dtype": "uint16", "tokens": {}}
    Path("data/odd").mkdir(parents=True)
    Path("data/odd/meta.json").write_text(json.dumps(meta | change))
    with pytest.raises(UserError, match=f"meta.json is damaged .*{next(iter(change.values()))}"):
        load_meta("odd")
