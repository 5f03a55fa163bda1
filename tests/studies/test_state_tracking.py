"""State tracking: the task, a run, the scores."""

import itertools
import json
import warnings

import pytest
import torch

from configurator import UserError, parse, run_command
from studies import state_tracking as st

SMALL = ["--n_embd=32", "--n_head=2", "--n_kv_head=1", "--head_dim=16", "--n_hidden=32",
         "--n_layer=2", "--block_size=8", "--batch_size=4", "--score_length=12", "--score_rows=8",
         "--log_interval=2", "--device=cpu"]


def command(*argv):
    run_command("", st.COMMANDS, [*argv], "")


def run(tmp_path, *argv):
    command("train", *SMALL, *argv, f"--json={tmp_path}/one.json")
    return json.loads((tmp_path / "one.json").read_text())


def test_targets_are_the_products_of_permutations_so_far():
    permutations = list(itertools.permutations(range(5)))
    x, y = st.Rows("s5", 20, 1, "cpu")(3)
    assert x.max() < 120
    for elements, targets in zip(x.tolist(), y.tolist()):
        state = tuple(range(5))
        for e, target in zip(elements, targets):
            state = tuple(permutations[e][i] for i in state)
            assert permutations[target] == state


def test_the_control_adds_modulo_60():
    x, y = st.Rows("z60", 30, 1, "cpu")(4)
    assert torch.equal(y, x.cumsum(1) % 60)


def test_rows_are_the_same_for_a_seed_and_new_with_every_call():
    a, b = st.Rows("s5", 9, 5, "cpu"), st.Rows("s5", 9, 5, "cpu")
    first = a(4)[0]
    assert torch.equal(first, b(4)[0]) and not torch.equal(first, a(4)[0])


@pytest.mark.parametrize("argv", [
    ["--kv=vanilla"], ["--kv=feedback", "--schedule=8x0+1"],
    ["--kv=recurrent", "--schedule=2x1+2"], ["--kv=nofeedback", "--schedule=1x0+1"],
    ["--n_channels=2", "--schedule=4x1+1", "--start=last", "--then=8x0+1", "--then_steps=2"],
    ["--group=z60", "--lckv_w=0", "--kv=lckv"]], ids=lambda argv: argv[-1])
def test_a_run_trains_and_is_scored_at_every_position(tmp_path, argv):
    result = run(tmp_path, "--max_iters=4", *argv)
    assert [step for step, _ in result["losses"]] == [2, 4]
    assert len(result["exact"]) == 12 and len(result["as_trained"]) == 8
    if result["kv"] in ("vanilla", "nofeedback") or result["schedule"] == "8x0+1":  # exact
        assert result["as_trained"] == result["exact"][:8]
    if argv[-1] in ("--kv=vanilla", "--kv=lckv"):  # the system's own
        assert result["schedule"] == {"vanilla": "1x0+1", "lckv": "1x7+2"}[result["kv"]]
    passes, each = sum(map(int, result["schedule"].split("x")[1].split("+"))), result["each_pass"]
    if result["kv"] in ("vanilla", "nofeedback"):
        assert each is None
    elif result["then"] is None:
        assert each[passes - 1][:8] == result["as_trained"] and len(each) == 12
        assert len(each[0]) == 12
    if result["kv"] == "whitematter":
        assert torch.tensor(result["routing"]["keys"]).shape == (2, 2)


def test_a_run_that_diverged_is_no_result(tmp_path):
    with pytest.raises(UserError, match="step 3: loss nan|step 3: the weights are not finite"):
        run(tmp_path, "--max_iters=3", "--log_interval=100", "--schedule=4x1+2",
            "--learning_rate=1e9")
    assert not (tmp_path / "one.json").exists()


def test_a_model_that_can_learns_the_first_products(tmp_path):
    """The first target is the element itself, the second a product of two."""
    result = run(tmp_path, "--kv=vanilla", "--schedule=1x0+1", "--group=z60", "--max_iters=120",
                 "--batch_size=64", "--block_size=2", "--learning_rate=1e-2", "--score_rows=200")
    assert result["exact"][0] > 0.9 and result["losses"][-1][1] < 0.7 * result["losses"][0][1]


def test_start_last_is_the_bias_of_one_channel_for_all():
    c = parse(st.TrackingConfig(), [*SMALL, "--n_channels=2", "--start=last"], "")
    branch = st.make_model(c, "cpu").kv_pool.key
    assert branch.bias.tolist() == [[0, 0.25], [0, 0.25]]


@pytest.mark.parametrize("argv, said", [
    (["--group=s4"], "choose one of s5, z60"), (["--schedule=8"], "groups x passes"),
    (["--schedule=0x1+1"], "groups x passes"), (["--schedule=9x0+1"], "more groups than"),
    (["--kv=vanilla", "--schedule=2x1+2"], "kv=vanilla has one pass"),
    (["--start=first"], "choose own or last"), (["--kv=vanila"], "choose one of whitematter"),
    (["--kv=vanilla", "--start=last"], "no channels with a choice"),
    (["--kv=nofeedback", "--start=last"], "no channels with a choice"),
    (["--then=8x0+1", "--then_steps=8000"], "then_steps=8000"), (["--then=abc"], "then=abc"),
    (["--learning_rate=nan"], "learning_rate=nan"), (["--learning_rate=-1"], "learning_rate=-1")])
def test_bad_settings_are_named(argv, said):
    with pytest.raises(UserError, match=said):
        command("train", *SMALL, *argv)


def test_all_runs_have_names_of_their_own_and_settings_that_train_takes():
    jobs = list(st.jobs(st.StudyConfig()))
    assert len({j.name for j in jobs}) == len(jobs) > 60
    for j in jobs:
        c = parse(st.TrackingConfig(), j.commands[0][3:], "")
        assert c.model().kv in j.name or c.kv in ("whitematter", "lckv")


def test_reach_is_the_first_position_that_fails():
    assert st.reach([1.0, 0.95, 0.8, 1.0]) == 2 and st.reach([1.0]) == 1
    assert st.summary([1.0] * 16 + [0.5] * 4) == "100.0 % at 1-16, 50.0 % at 17-20"


def test_the_picture_is_drawn_from_the_results(tmp_path):
    pytest.importorskip("matplotlib")
    runs = [dict(name=f"{s}{p}", system=s, schedule=p, group="s5", start="own", then=None,
                 seed=1337, learning_rate=1e-3, block_size=32, exact=[1.0] * 20 + [0.1] * 108,
                 as_trained=[1.0] * 20 + [0.1] * 12)
            for s, p in (("k1", "8x1+2"), ("k1", "32x0+1"), ("feedback", "4x1+1"),
                         ("vanilla", "1x0+1"))]
    (tmp_path / "all.json").write_text(json.dumps({"runs": runs}))
    command("plot", f"--json={tmp_path}/all.json", f"--output={tmp_path}/picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    (tmp_path / "first.json").write_text(json.dumps({"runs": runs[-1:]}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        command("plot", f"--json={tmp_path}/first.json", f"--output={tmp_path}/first.png")
    (tmp_path / "old.json").write_text(json.dumps({"runs": [runs[0] | {"name": "a"}]}).replace(
        '"start": "own", ', ""))
    with pytest.raises(UserError, match="old.json: .*no start"):
        command("plot", f"--json={tmp_path}/old.json", f"--output={tmp_path}/old.png")
