"""Two runs do not share a folder."""

import shutil
from pathlib import Path

import pytest
from runs import in_process, load, losses, make

from configurator import UserError


def test_two_runs_do_not_share_a_folder(folder, monkeypatch):
    pytest.importorskip("fcntl")
    in_process(folder, monkeypatch, max_iters=2)
    first = make(folder, monkeypatch, max_iters=3, init_from="resume")  # which is not done
    for init_from in ("scratch", "resume", "auto"):
        with pytest.raises(UserError, match="out_dir=out: another run is writing there"):
            make(folder, monkeypatch, init_from=init_from)
    assert sorted(losses("out/log.csv")) == [0, 1]
    first.lock.close()
    assert in_process(folder, monkeypatch, max_iters=3, init_from="resume").step == 3


@pytest.mark.parametrize("moved", [False, True])
def test_a_folder_that_is_moved_or_removed_is_made_anew(folder, monkeypatch, capsys, moved):
    trainer = make(folder, monkeypatch, max_iters=4)
    trainer.update()
    shutil.move("out", "before") if moved else shutil.rmtree("out")
    trainer.run()
    assert "note: out was moved or removed" in capsys.readouterr().out
    assert sorted(losses("out/log.csv")) == [1, 2, 3] and load("out/ckpt.pt")["step"] == 4


def test_a_run_that_has_come_to_the_place_of_a_moved_folder_is_kept(folder, monkeypatch, capsys):
    pytest.importorskip("fcntl")
    trainer = make(folder, monkeypatch, max_iters=4)
    trainer.update()
    shutil.move("out", "before")
    in_process(folder, monkeypatch, max_iters=2, seed=7)
    finished = Path("out/ckpt.pt").read_bytes()
    trainer.run()
    assert "the run that lay there is kept in out/previous" in capsys.readouterr().out
    assert Path("out/previous/ckpt.pt").read_bytes() == finished
    assert sorted(losses("out/previous/log.csv")) == [0, 1]
    assert sorted(losses("out/log.csv")) == [1, 2, 3] and load("out/ckpt.pt")["step"] == 4


def test_a_lock_that_is_removed_is_taken_again(folder, monkeypatch, capsys):
    trainer = make(folder, monkeypatch, max_iters=2)
    Path("out/.lock").unlink()
    trainer.run()
    assert Path("out/.lock").exists() and "moved" not in capsys.readouterr().out


def test_a_run_whose_folder_another_one_has_by_now_leaves_it_alone(folder, monkeypatch):
    pytest.importorskip("fcntl")
    trainer = make(folder, monkeypatch, max_iters=4)
    trainer.update()
    shutil.rmtree("out")
    other = make(folder, monkeypatch, max_iters=2, seed=2)
    other.update()
    with pytest.raises(UserError, match="out: another run.*moved or removed.*are not saved"):
        trainer.run()
    other.run()
    assert sorted(losses("out/log.csv")) == [0, 1] and load("out/ckpt.pt")["config"]["seed"] == 2
