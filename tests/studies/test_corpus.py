"""The runs of the study on a corpus: their commands, and what is read off their results."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from runs import ROOT

import evaluate
from checkpoint import load_checkpoint, save_checkpoint
from configurator import UserError, parse, run_command
from running.settings import TrainConfig
from studies import corpus

STUDY = corpus.CorpusConfig()


def command(*argv):
    run_command("", corpus.COMMANDS, [*argv], "")


def every_job():
    return [*corpus.systems(STUDY), *corpus.schedules(STUDY)]


def test_commands_are_ones_that_train_and_evaluate_take():
    names = [j.name for j in every_job()]
    assert len(names) == len(set(names)) == len(corpus.SYSTEMS) + 2 * 5 + 4 * 2 + 3 + 24
    for j in every_job():
        train, score = j.commands
        assert train[0] == "train.py" and score[:2] == ["evaluate.py", "perplexity"]
        c = parse(TrainConfig(), train[1:], "")
        s = parse(evaluate.PerplexityConfig(), score[2:], "")
        assert s.out_dir == c.out_dir == f"out/study/corpus/{j.name}"
        assert c.batch_size * c.block_size * c.gradient_accumulation_steps == 16384


def test_a_schedule_is_the_paper_s_grid_at_k_8():
    cells = set()
    for j in corpus.schedules(STUDY):
        c = parse(TrainConfig(), j.commands[0][1:], "")
        assert (c.kv, c.n_channels, c.max_iters) == ("whitematter", 8, 2000)
        cells.add((c.n_groups, c.n_nograd, c.n_grad))
    assert cells == {(g, n, m) for g in (1, 4, 8, 16) for n in (1, 2, 4) for m in (1, 2)}


@pytest.fixture
def finished(folder, monkeypatch):
    """A job whose run is in its folder: trained and scored on data/random."""
    study = corpus.CorpusConfig(folder=f"{folder}/runs", dataset="random",
                                json=f"{folder}/mine.json")
    job = next(j for j in corpus.systems(study) if j.name == "wm16_k8-1337-0.004")
    monkeypatch.chdir(ROOT)
    c = parse(TrainConfig(), job.commands[0][1:], "")
    monkeypatch.chdir(folder)
    path = folder / "data/random/meta.json"
    meta = json.loads(path.read_text()) | {"test_digest": "ab"}
    path.write_text(json.dumps(meta))
    out = folder / "runs/random" / job.name
    out.mkdir(parents=True)
    save_checkpoint(out / "ckpt.pt", {"model": {}, "model_config": {}, "config": asdict(c),
                                      "meta": meta})
    monkeypatch.setattr(corpus, "parse", lambda *_: c)  # the configs are not in this folder
    (out / "log.csv").write_text("step,loss,val_loss\n0,10.8,\n1000,,4.5\n1001,4.4,\n2000,,4.1\n")
    (out / "score.json").write_text(json.dumps({
        "loss": 3.7, "perplexity": 40.4, "targets": 1000, "device": "d", "torch": "t", "step": 2000,
        "settings": {}, "seconds": 3}))
    return job, c, study


def test_a_record_has_the_scores_and_every_validation_loss(finished):
    assert finished[0].record() == {
        "dataset": "random", "config": "wm16_k8", "seed": 1337, "learning_rate": 0.004,
        "test_digest": "ab", "loss": 3.7, "perplexity": 40.4,
        "validation": [[1000, 4.5], [2000, 4.1]], "step": 2000, "targets": 1000, "device": "d",
        "torch": "t", "settings": finished[0].settings()}
    assert finished[0].settings() == {
        "batch_size": 8, "gradient_accumulation_steps": 1, "max_iters": 4000, "n_channels": 8,
        "learning_rate": 0.004, "dataset": "random"}


def test_a_run_of_other_settings_or_of_other_data_is_not_recorded(finished):
    job, c, study = finished
    c.learning_rate = 0.2  # as if config/short.py had changed since
    for look in (job.record, job.check):  # when it has ended, and before it goes on
        with pytest.raises(UserError, match="trained with learning_rate=0.004, and the settings"):
            look()
    c.learning_rate = 0.004
    job.check()
    out = Path(study.folder, "random", job.name)
    state = load_checkpoint(out)
    save_checkpoint(out / "ckpt.pt", state | {"prepared_again": True})
    with pytest.raises(UserError, match="dataset=random was prepared again between parts of the"):
        job.record()
    save_checkpoint(out / "ckpt.pt", state)
    path = Path("data/random/meta.json")
    path.write_text(path.read_text().replace('"ab"', '"cd"').replace('"test": 0', '"test": 700'))
    with pytest.raises(UserError, match="dataset=random was prepared again since"):
        job.record()
    Path("data/random/test.bin").write_bytes(Path("data/random/val.bin").read_bytes())
    Path(study.json).write_text(
        '{"runs": [{"name": "x", "dataset": "random", "test_digest": "ab"}]}')
    with pytest.raises(UserError, match="it has results on another test set"):
        corpus.check_splits(study)


def test_a_data_set_without_a_test_set_is_refused_before_any_run(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for name in ("systems", "schedules"):
        with pytest.raises(UserError, match="data/random has no test.bin.*--test_rows"):
            command(name, "--dataset=random", f"--folder={folder}/runs")
        command(name, "--dataset=random", "--list")
    assert not list((folder / "runs").iterdir())


def test_results_of_another_data_set_are_not_mixed_in():
    with pytest.raises(UserError, match="it has results of dataset=corpus, and takes none of mine"):
        command("systems", "--dataset=mine", "--list", f"--json={ROOT}/results/study.json")


def test_other_rates_are_no_seeds():
    records = [dict(config="k8", perplexity=p, learning_rate=r)
               for p, r in ((40.0, 2e-3), (41.0, 2e-3), (50.0, 4e-3))]
    assert corpus.by_system(records) == {"k8": [40.0, 41.0]}


@pytest.mark.parametrize("config, cache, gflop", [
    ("vanilla16", 1, 0.4436), ("wm16_k8", 0.5, 0.9967), ("vanilla24", 1.5, 0.6654)])
def test_sizes_are_those_of_the_table_of_flop(config, cache, gflop):
    assert corpus.sizes(config) == (cache, pytest.approx(gflop, abs=1e-4))


def test_pictures_are_drawn_from_the_results(tmp_path):
    pytest.importorskip("matplotlib")
    runs = [dict(name=f"g{g}-{n}+{m}", n_groups=g, n_nograd=n, n_grad=m,
                 training_schedule={"best": 50.0 + g}, decoding={"perplexity": 51.0},
                 jacobi={"passes_to_best": None if g == 1 else 9})
            for g in corpus.GROUPS for n in corpus.NO_GRAD for m in corpus.GRAD]
    (tmp_path / "schedules.json").write_text(json.dumps({"runs": runs}))
    command("plot", f"--systems={ROOT}/results/study.json", f"--output={tmp_path}",
            f"--schedules={tmp_path}/schedules.json")
    assert (tmp_path / "study.png").stat().st_size > 10_000
    (tmp_path / "other.json").write_text(json.dumps({"runs": [dict(
        name="x", config="wm16", learning_rate=1e-3, perplexity=40.0)]}))
    command("plot", f"--systems={tmp_path}/other.json", f"--output={tmp_path}/other")
    assert not (tmp_path / "other").exists()
    assert (tmp_path / "schedules.png").stat().st_size > 10_000
    command("plot", f"--schedules={tmp_path}/schedules.json", f"--output={tmp_path}/one")
    assert os.listdir(tmp_path / "one") == ["schedules.png"]
