"""Many runs and one file of results."""

import json
import time

import pytest

from configurator import UserError
from studies.jobs import Job, add_record, chosen, read_records, run_jobs


def job(name, *code, value=1):
    return Job(name, [["-c", c] for c in code], lambda: {"value": value})


def test_every_job_leaves_its_record_its_commands_and_its_output(tmp_path, capsys):
    path = str(tmp_path / "all.json")
    jobs = [job("b", "print('first')", "print('second')", value=2), job("a", "pass")]
    run_jobs(jobs, path, tmp_path / "logs", at_once=2, minutes=None)
    assert [(r["name"], r["value"]) for r in read_records(path)] == [("a", 1), ("b", 2)]
    assert read_records(path)[1]["commands"] == ["python -c print('first')",
                                                 "python -c print('second')"]
    assert (tmp_path / "logs/b.txt").read_text().split() == ["first", "second"]
    assert "a: done" in capsys.readouterr().out


def test_a_job_that_fails_leaves_no_record_and_the_others_go_on(tmp_path, capsys):
    path = str(tmp_path / "all.json")
    jobs = [job("bad", "raise SystemExit(3)", "print('never')"), job("good", "pass")]
    run_jobs(jobs, path, tmp_path, at_once=1, minutes=None)
    assert [r["name"] for r in read_records(path)] == ["good"]
    assert "bad: failed with status 3: see" in capsys.readouterr().out
    assert "never" not in (tmp_path / "bad.txt").read_text()


def test_when_the_time_is_up_jobs_are_asked_to_stop_and_no_other_starts(tmp_path, capsys):
    path, began = str(tmp_path / "all.json"), time.monotonic()
    jobs = [job("long", "import time; time.sleep(60)"), job("later", "pass")]
    run_jobs(jobs, path, tmp_path, at_once=1, minutes=0.5 / 60)
    assert time.monotonic() - began < 30 and not read_records(path)
    assert capsys.readouterr().out.startswith("long: stopped for lack of time")


def test_jobs_with_a_record_are_not_made_again_and_names_choose(tmp_path):
    path = str(tmp_path / "all.json")
    jobs = [job("k8-1"), job("k8-2"), job("vanilla-1")]
    add_record(path, {"name": "k8-1", "value": 0})
    assert [j.name for j in chosen(jobs, None, path)] == ["k8-2", "vanilla-1"]
    assert [j.name for j in chosen(jobs, "vanilla,k8", path)] == ["vanilla-1", "k8-2"]
    with pytest.raises(UserError, match="no run has 'k9' in its name; there are k8-1, k8-2"):
        chosen(jobs, "k9", path)


def test_a_record_takes_the_place_of_one_of_its_name(tmp_path):
    path = tmp_path / "all.json"
    for value in (1, 2):
        add_record(str(path), {"name": "a", "value": value})
    assert json.loads(path.read_text()) == {"runs": [{"name": "a", "value": 2}]}


def test_a_file_that_is_no_file_of_results_is_refused(tmp_path):
    path = tmp_path / "other.json"
    for text in ("{}", "no json", '{"runs": [1]}', '{"runs": [{"system": "k8"}]}'):
        path.write_text(text)
        with pytest.raises(UserError, match="not a file of results"):
            read_records(str(path))
