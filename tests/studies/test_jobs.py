"""Many runs and one file of results."""

import json
import os
import time
from dataclasses import replace
from functools import partial

import pytest

from configurator import UserError, parse
from studies.jobs import Job, StudyConfig, add_record, chosen, read_records, run_jobs, study


def job(name, *code, value=1):
    return Job(name, [["-c", c] for c in code], lambda: {"value": value})


def test_every_job_leaves_its_record_its_commands_and_its_output(tmp_path, capsys):
    path = str(tmp_path / "all.json")
    jobs = [job("b", 'print("first")', 'print("second")', value=2), job("a", "pass")]
    (tmp_path / "logs").mkdir()
    assert run_jobs(jobs, path, tmp_path / "logs", at_once=2, minutes=None) == 0
    assert [(r["name"], r["value"]) for r in read_records(path)] == [("a", 1), ("b", 2)]
    assert read_records(path)[1]["commands"] == [
        """python -c 'print("first")'""", """python -c 'print("second")'"""]
    assert (tmp_path / "logs/b.txt").read_text().split() == ["first", "second"]
    assert "a: done" in capsys.readouterr().out


def test_a_job_that_fails_leaves_no_record_and_the_others_go_on(tmp_path, capsys):
    path = str(tmp_path / "all.json")
    jobs = [job("bad", "raise SystemExit(3)", "print('never')"), job("good", "pass")]
    assert run_jobs(jobs, path, tmp_path, at_once=1, minutes=None) == 1
    assert [r["name"] for r in read_records(path)] == ["good"]
    assert "bad: failed: see" in capsys.readouterr().out
    assert "never" not in (tmp_path / "bad.txt").read_text()


def test_when_the_time_is_up_jobs_are_asked_to_stop_and_no_other_starts(tmp_path, capsys):
    path, began = str(tmp_path / "all.json"), time.monotonic()
    jobs = [job("long", "import time; time.sleep(60)"), job("later", "pass")]
    assert run_jobs(jobs, path, tmp_path, at_once=1, minutes=0.5 / 60) == 2
    assert time.monotonic() - began < 30 and not read_records(path)
    assert capsys.readouterr().out.startswith("long: stopped, after")


def test_jobs_with_a_record_are_not_made_again_and_names_choose(tmp_path):
    path = str(tmp_path / "all.json")
    jobs = [job("k8-1"), job("k8-2"), job("vanilla-1")]
    add_record(path, {"name": "k8-1", "value": 0})
    assert [j.name for j in chosen(jobs, None, path)] == ["k8-2", "vanilla-1"]
    assert [j.name for j in chosen(jobs, "vanilla,k8", path)] == ["vanilla-1", "k8-2"]
    for only, part in (("k9", "k9"), ("k8,", "")):
        with pytest.raises(UserError, match=f"no run has '{part}' in its name; there are k8-1, k8"):
            chosen(jobs, only, path)


def test_a_whole_name_is_no_part_of_others(tmp_path):
    jobs = [job("k8-1-0.004"), job("k8-1")]
    path = str(tmp_path / "none.json")
    assert [j.name for j in chosen(jobs, "k8-1", path)] == ["k8-1"]
    assert [j.name for j in chosen(jobs, "k8", path)] == ["k8-1-0.004", "k8-1"]


def test_a_run_whose_results_cannot_be_read_leaves_the_others(tmp_path, capsys):
    path = str(tmp_path / "all.json")
    bad = Job("bad", [["-c", "pass"]], lambda: json.loads("no json"))
    assert run_jobs([bad, job("good", "pass")], path, tmp_path, 1, None) == 1
    assert [r["name"] for r in read_records(path)] == ["good"]
    assert "bad: failed: its results cannot be read" in capsys.readouterr().out


def test_a_job_that_an_earlier_start_does_not_fit_runs_nothing(tmp_path, capsys):
    def check():
        raise UserError("trained with another seed")

    jobs = [Job("bad", [["-c", "print('never')"]], dict, check), job("good", "pass")]
    assert run_jobs(jobs, str(tmp_path / "all.json"), tmp_path, 1, None) == 1
    assert "bad: failed: trained with another seed" in capsys.readouterr().out
    assert not (tmp_path / "bad.txt").exists()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_is_passed_on_and_nothing_is_left_running(name, tmp_path):
    path, began = str(tmp_path / "all.json"), time.monotonic()
    code = f"import os, signal, time; os.kill({os.getpid()}, signal.{name}); time.sleep(60)"
    assert run_jobs([job("long", code)], path, tmp_path, 1, None) == 1
    assert time.monotonic() - began < 30


def run_study(tmp_path, *argv, jobs=()):
    argv = [f"--folder={tmp_path}/out", f"--json={tmp_path}/all.json", *argv]
    study(parse(StudyConfig(), argv, "a study"), lambda c: jobs)


def test_a_study_runs_what_is_left_and_says_so_if_something_stays(tmp_path, capsys):
    run_study(tmp_path, jobs=[job("a", "pass")])
    run_study(tmp_path, jobs=[job("a", "pass")])
    assert capsys.readouterr().out.endswith("all.json: nothing left to do\n")
    with pytest.raises(UserError, match="1 of 1 runs have no result yet; the same command"):
        run_study(tmp_path, jobs=[job("b", "raise SystemExit(1)")])
    run_study(tmp_path, "--list", jobs=[job("a", "pass"), job("b", "pass")])
    assert capsys.readouterr().out.endswith("\nb\n")


@pytest.mark.parametrize("argv, said", [
    (["--at_once=0"], "at_once=0"), (["--minutes=-1"], "minutes=-1.0"), (["--minutes=0"], "None"),
    (["--minutes=nan"], "minutes=nan"), (["--json=-"], "a study adds to a file"),
    (["--json=/none/all.json"], "no such folder"), (["--json=/tmp"], "this is a folder"),
    (["--folder=/dev/null/x"], "folder=/dev/null/x: Not a directory")])
def test_bad_settings_are_named_before_anything_runs(tmp_path, argv, said):
    with pytest.raises(UserError, match=said):
        run_study(tmp_path, *argv, jobs=[job("a", "pass")])


def test_a_record_takes_the_place_of_one_of_its_name(tmp_path):
    path = tmp_path / "all.json"
    for value in (1, 2):
        add_record(str(path), {"name": "a", "value": value})
    assert json.loads(path.read_text()) == {"runs": [{"name": "a", "value": 2}]}


def test_records_of_other_settings_or_of_another_study_are_no_results(tmp_path):
    path = str(tmp_path / "all.json")
    add_record(path, {"name": "a", "settings": {"rate": 1}})
    same, other = (replace(job("a", "pass"), settings=partial(dict, rate=n)) for n in (1, 2))
    assert not chosen([same], None, path)
    with pytest.raises(UserError, match="its a had other settings than those of today"):
        chosen([other], None, path)
    with pytest.raises(UserError, match="not the file of results that is needed here.*perplexity"):
        chosen([same], None, path, ("perplexity",))


def test_a_file_that_is_no_file_of_results_is_refused(tmp_path):
    path = tmp_path / "other.json"
    for text in ("{}", "no json", '{"runs": [1]}', '{"runs": [{"system": "k8"}]}'):
        path.write_text(text)
        with pytest.raises(UserError, match="not the file of results"):
            read_records(str(path))
    add_record(str(tmp_path / "all.json"), {"name": "a"})
    with pytest.raises(UserError, match="no perplexity"):
        read_records(str(tmp_path / "all.json"), "name", "perplexity")
