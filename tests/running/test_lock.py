"""Two runs do not share a folder."""

import pytest
from runs import in_process, losses, make

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
