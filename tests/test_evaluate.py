"""evaluate.py: perplexity of a file and log-likelihoods of texts, against hand computation."""

import contextlib
import json
import math
import os
import random
import re
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch
from small import random_tokens, small_model, with_documents

import evaluate
from checkpoint import save_checkpoint
from configurator import UserError, run
from evaluate import Losses, Windows, mean_losses
from kernels import accelerate
from measure import downstream
from measure.downstream import Scorer, pieces
from measure.schedules import Schedule, first_within
from solvers import autoregressive, cyclic, jacobi, solve
from text.tokenizer import from_encoding, get_tokenizer

BYTES = dict(vocab_size=320, eos_id=256, n_groups=4)
META = {"tokenizer": "bytes", "vocab_size": 257, "eos_id": 256, "dtype": "uint16", "tokens": {}}


def write_tokens(path, n, seed=0, low=0, high=257):
    """n ids, an EOS among them every now and then."""
    ids = np.random.default_rng(seed).integers(low, high, size=n)
    ids[11::17] = 256
    path.parent.mkdir(parents=True, exist_ok=True)
    ids.astype("<u2").tofile(path)
    return ids.tolist()


def save_model(folder, meta=META, **changes):
    model = small_model(dtype=torch.float32, **{**BYTES, **changes})
    save_checkpoint(folder / "ckpt.pt", {
        "model": model.state_dict(), "model_config": asdict(model.config), "meta": meta,
        "config": {"dataset": "noise", "block_size": 8}, "step": 7})
    return model


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with a checkpoint in out/ and a data set of 83 test tokens."""
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "out")
    write_tokens(tmp_path / "data" / "noise" / "test.bin", 83)
    meta = META | {"tokens": {"test": 83}}
    (tmp_path / "data" / "noise" / "meta.json").write_text(json.dumps(meta))
    return tmp_path


# ---- perplexity

@pytest.mark.parametrize("n, T, batch_size", ((23, 5, 2), (21, 5, 3), (22, 5, 1), (4, 9, 2),
                                              (2, 1, 7), (41, 8, 100)))
@pytest.mark.parametrize("full", (False, True))
def test_every_token_but_the_first_is_a_target_once(tmp_path, n, T, batch_size, full):
    ids = write_tokens(tmp_path / "test.bin", n)
    windows = Windows(tmp_path / "test.bin", META, T)
    read, targets = [], []
    for x, y in windows.batches(batch_size, "cpu", full):
        assert x.shape == y.shape and x.size(1) == min(T, n - 1) and x.dtype == torch.long
        assert len(x) == batch_size or not full
        read += x[y != -1].tolist()
        targets += y[y != -1].tolist()
    assert (read, targets) == (ids[:-1], ids[1:])
    assert windows.n_targets == n - 1 and len(windows) == math.ceil((n - 1) / T)


def by_hand(model, ids, T, solver):
    """Mean nats of all targets: each window by itself, without padding, from the logits."""
    nats = 0.0
    for i in range(0, len(ids) - 1, T):
        window = torch.tensor(ids[i:i + T + 1])
        logp = model.logits(solver(model, window[None, :-1]).final)[0].log_softmax(-1)
        nats -= logp.gather(1, window[1:, None]).sum().item()
    return nats / (len(ids) - 1)


def means(losses, windows, batch_size):
    return mean_losses(losses, windows, batch_size, accelerate(losses.model, torch.float64))


SCHEDULES = (
    (Schedule("training"), solve),
    (Schedule("cyclic", 2, 3), lambda m, x: cyclic(m, x, 3, 2, 0)),
    (Schedule("jacobi", 4), lambda m, x: jacobi(m, x, 4, 0)),
    (Schedule("autoregressive"), autoregressive))


@torch.no_grad()
@pytest.mark.parametrize("schedule, solver", SCHEDULES, ids=lambda s: getattr(s, "solver", ""))
def test_perplexity_by_hand_and_for_any_batch_size(tmp_path, schedule, solver):
    model = small_model(**BYTES)
    ids = write_tokens(tmp_path / "test.bin", 60)
    windows = Windows(tmp_path / "test.bin", META, 8)  # 7 of 8 and one of 3
    expected = by_hand(model, ids, 8, solver)
    for batch_size in (1, 2, 7, 100):
        assert means(Losses(model, schedule), windows, batch_size) == pytest.approx(
            [expected], rel=1e-12)


@torch.no_grad()
def test_a_tolerance_gives_the_exact_perplexity(tmp_path):
    model = small_model(**BYTES)
    ids = write_tokens(tmp_path / "test.bin", 60)
    losses = Losses(model, Schedule("cyclic", 1, 2, tol=1e-12))
    (loss,) = means(losses, Windows(tmp_path / "test.bin", META, 8), 3)
    assert loss == pytest.approx(by_hand(model, ids, 8, SCHEDULES[-1][1]), rel=1e-10)
    assert losses.converged and 1 < losses.passes <= 8


@torch.no_grad()
def test_vanilla_takes_its_one_pass(folder, capsys):
    model = save_model(folder / "vanilla", kv="vanilla").double()
    evaluate.main(["perplexity", "--out_dir=vanilla", "--device=cpu", "--passes=5",
                   "--json=result.json"])
    result = json.loads((folder / "result.json").read_text())
    ids = np.fromfile("data/noise/test.bin", "<u2").tolist()
    assert result["loss"] == pytest.approx(by_hand(model, ids, 8, SCHEDULES[0][1]), rel=1e-5)
    assert (result["solver"], result["passes"]) == ("one pass", 1)
    assert "one pass" in capsys.readouterr().out


@torch.no_grad()
def test_losses_after_every_pass_are_those_of_separate_solves(tmp_path):
    model = small_model(**BYTES)
    write_tokens(tmp_path / "test.bin", 60)
    windows = Windows(tmp_path / "test.bin", META, 8)
    for solver, g in (("cyclic", 3), ("cyclic", 20), ("jacobi", 1)):
        every = means(Losses(model, Schedule(solver, 4, g), every_pass=True), windows, 3)
        for n, loss in enumerate(every, 1):
            (alone,) = means(Losses(model, Schedule(solver, n, g)), windows, 4)
            assert loss == pytest.approx(alone, rel=1e-12)


@torch.no_grad()
def test_a_window_is_no_longer_than_the_file_and_that_it_was_not_trained_is_said(folder, capsys):
    evaluate.main(["perplexity", "--device=cpu", f"--block_size={2**62}", "--json=r.json"])
    assert "positions beyond it were never trained" in capsys.readouterr().out
    result = json.loads((folder / "r.json").read_text())
    ids = np.fromfile("data/noise/test.bin", "<u2").tolist()
    assert result["loss"] == pytest.approx(
        by_hand(small_model(**BYTES), ids, 82, SCHEDULES[0][1]), rel=1e-5)


@torch.no_grad()
def test_command_prints_and_writes_what_the_model_scores(folder, capsys):
    found = {}
    for batch_size in (1, 5):
        evaluate.main(["perplexity", "--device=cpu", f"--batch_size={batch_size}", "--json=-"])
        found[batch_size] = json.loads(capsys.readouterr().out.splitlines()[-1])
    model = small_model(**BYTES)  # the same weights in float64
    ids = np.fromfile("data/noise/test.bin", "<u2").tolist()
    expected = by_hand(model, ids, 8, SCHEDULES[0][1])
    for result in found.values():
        assert result["loss"] == pytest.approx(expected, rel=1e-5)
        assert result["perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)
        assert (result["targets"], result["windows"], result["block_size"]) == (82, 11, 8)
        assert (result["solver"], result["n_groups"], result["passes"]) == ("training", 4, 3)
    evaluate.main(["perplexity", "--device=cpu", "--limit_rows=2", "--block_size=9",
                   "--solver=jacobi", "--passes=2", "--json=-"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    expected = by_hand(model, ids[:19], 9, lambda m, x: jacobi(m, x, 2, 0))
    assert result["loss"] == pytest.approx(expected, rel=1e-5) and result["targets"] == 18
    evaluate.main(["perplexity", "--device=cpu", "--exact", "--json=-"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["converged"] and result["tol"] == 1e-5
    assert result["loss"] == pytest.approx(by_hand(model, ids, 8, SCHEDULES[-1][1]), rel=1e-4)


@torch.no_grad()
def test_the_papers_three_figures(folder, capsys):
    evaluate.main(["perplexity", "--device=cpu", "--solver=paper", "--block_size=10",
                   "--limit_rows=4", "--passes=6", "--json=result.json"])
    out = capsys.readouterr().out
    result = json.loads((folder / "result.json").read_text())
    model = small_model(**BYTES)
    ids = np.fromfile("data/noise/test.bin", "<u2").tolist()[:41]

    def ppl(solver):
        return math.exp(by_hand(model, ids, 10, solver))

    trained = result["training_schedule"]
    assert trained["perplexities"] == pytest.approx(
        [ppl(lambda m, x, n=n: cyclic(m, x, 4, n, 0))
         for n in range(1, 7)], rel=1e-4)
    assert trained["best"] == min(trained["perplexities"])
    assert trained["best"] == trained["perplexities"][trained["best_passes"] - 1]
    # 32 passes of 16 groups over 10 tokens are exact
    assert result["decoding"]["perplexity"] == pytest.approx(ppl(autoregressive), rel=1e-4)
    tp = result["jacobi"]
    by_pass = [ppl(lambda m, x, n=n: jacobi(m, x, n, 0)) for n in range(1, 11)]
    for target, least, n in ((trained["best"], 0, tp["passes_to_best"]),
                             (result["decoding"]["perplexity"], 0.99, tp["passes_to_decoding"])):
        close = [least * target <= p <= 1.01 * target for p in by_pass]
        assert n == (1 + close.index(True) if any(close) else None)
    assert f"Jacobi passes to within 1% of (1): {tp['passes_to_best'] or 'more'}" in out
    assert f"best, with the groups of training: {trained['best']:.4f}" in out


def test_first_within_one_per_cent():
    assert first_within([30.0, 20.21, 20.2, 25.0], 20.0) == 3
    assert first_within([19.0], 20.0) == 1
    assert first_within([30.0, 20.3], 20.0) is None
    assert first_within([30.0, 19.7, 19.8, 20.0], 20.0, lower_too=False) == 3


TRAINED = SimpleNamespace(model=SimpleNamespace(
    config=SimpleNamespace(n_nograd=1, n_grad=2, n_groups=4)))


def test_jacobi_passes_go_on_until_they_suffice(monkeypatch, tmp_path):
    write_tokens(tmp_path / "test.bin", 900)
    windows, asked = Windows(tmp_path / "test.bin", META, 64), []

    def perplexities(c, fast, part, schedule, **_):
        asked.append((schedule.solver, schedule.passes))
        needs = 1 if schedule.solver == "cyclic" else 25
        return [20.0 if n >= needs else 40.0 for n in range(1, schedule.passes + 1)]

    monkeypatch.setattr(evaluate, "perplexities", perplexities)
    for most, passes, needed in ((128, [16, 32], 25), (20, [16, 20], None), (9, [9], None)):
        c, asked[:] = SimpleNamespace(max_passes=most, passes=None, n_groups=None), []
        found = evaluate.paper_study(c, TRAINED, windows)["jacobi"]
        assert [n for solver, n in asked if solver == "jacobi"] == passes
        assert found["passes_to_best"] == found["passes_to_decoding"] == needed


def test_the_best_is_looked_for_as_long_as_passes_gain(monkeypatch, tmp_path):
    write_tokens(tmp_path / "test.bin", 900)
    monkeypatch.setattr(evaluate, "perplexities", lambda c, fast, part, schedule, **_: [
        60.0 + 40.0 / n**2 for n in range(1, schedule.passes + 1)])
    c = SimpleNamespace(passes=None, n_groups=None, max_passes=30, batch_size=2)
    for passes, looked, at in ((None, 12, 12), (4, 4, 4)):
        c.passes = passes
        r = evaluate.paper_study(c, TRAINED, Windows(tmp_path / "test.bin", META, 32))
        found = r["training_schedule"]
        assert len(found["perplexities"]) == looked and found["best_passes"] == at


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kv", ("whitematter", "vanilla"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_graph_on_gpu(tmp_path, kv, dtype):
    model = small_model(dtype=torch.float32, kv=kv, n_embd=64, head_dim=32, n_hidden=64, **BYTES)
    write_tokens(tmp_path / "test.bin", 1000)
    windows = Windows(tmp_path / "test.bin", META, 128)
    schedule = Schedule("training", 3, 4)
    eager, graph = (mean_losses(Losses(fast.model, schedule), windows, 3, fast) for fast in
                    (accelerate(model.cuda(), dtype, graph=g) for g in (False, True)))
    assert graph == pytest.approx(eager, rel=1e-4)


def test_a_data_set_prepared_again_since_the_training_is_noted(folder, capsys):
    for theirs, said in (({}, ""), ({"train_digest": "1", "tokens": {"test": 83}}, ""),
                         ({"train_digest": "2"}, "again since the training: another train.bin;"),
                         ({"tokens": {"test": 84}}, "test.bin of 83 tokens (there: 84)")):
        damage(folder, train_digest="1")
        save_model(folder / "out", META | theirs)
        evaluate.main(["perplexity", "--device=cpu"])
        out = capsys.readouterr().out
        assert ("prepared again" in out) == bool(said) and said in out


# ---- bad input

def damage(folder, **changes):
    path = folder / "data" / "noise" / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("argv, message", (
    ([], "no command; choose one of perplexity, downstream"),
    (["perplexty"], "perplexty: unknown command"),
    (["perplexity", "--split=tests"], "split=tests: choose one of train, val, test"),
    (["perplexity", "--split=val"], "val.bin: no such data file"),
    (["perplexity", "--dataset=nowhere"], "prepare the data set first"),
    (["perplexity", "--out_dir=nowhere"], "no such checkpoint"),
    (["perplexity", "--solver=magic"],
     "solver=magic: choose one of cyclic, jacobi, autoregressive, paper"),
    (["perplexity", "--solver=jacobi", "--n_groups=5"], "n_groups=5: jacobi has one group"),
    (["perplexity", "--block_size=0"], "block_size=0: at least 1"),
    (["perplexity", "--batch_size=0"], "batch_size=0: at least 1"),
    (["perplexity", "--limit_rows=0"], "limit_rows=0: at least 1"),
    (["perplexity", "--passes=0"], "passes=0: at least 1"),
    (["perplexity", "--tol=0"], "tol=0.0: a number above 0"),
    (["perplexity", "--tol=nan"], "tol=nan: a number above 0"),
    (["perplexity", "--solver=paper", "--exact"], "solver=paper has schedules of its own"),
    (["perplexity", "--pases=2"], "did you mean passes"),
    (["perplexity", "--json=no/such/file"], "there is no such folder"),
    (["downstream", "--context=1"], "context=1: at least 2"),
    (["downstream", "--limit=0"], "limit=0: at least 1"),
    (["downstream", "--tasks=,"], "tasks=,: name at least one"),
    (["downstream", "--task_dir=nowhere"], "task_dir=nowhere: there is no such folder")))
def test_bad_input(folder, argv, message):
    with pytest.raises(UserError) as error:
        evaluate.main(argv)
    assert message in str(error.value)


def test_damaged_weights_have_no_perplexity(folder):
    state = torch.load("out/ckpt.pt", weights_only=True)
    state["model"]["embed.weight"][3] = torch.nan
    torch.save(state, "out/nan.pt")
    for more in ([], ["--solver=paper"]):
        with pytest.raises(UserError, match="loss nan: logits that are not finite"):
            evaluate.main(["perplexity", "--out_dir=out/nan.pt", "--device=cpu", *more])
    assert evaluate.perplexity_of(1e4) == math.inf


@pytest.mark.parametrize("changes, message", (
    ({"dtype": "foo"}, "meta.json is damaged"),
    ({"tokens": [1]}, "meta.json is damaged"),
    ({"tokenizer": "gpt2"}, "tokenizer=gpt2, out was trained with tokenizer=bytes"),
    ({"vocab_size": 300}, "vocab_size=300, out was trained with vocab_size=257"),
    ({"eos_id": 0}, "eos_id=0, out was trained with eos_id=256"),
    ({"dtype": "uint32"}, "41.5 tokens of uint32, but meta.json says 83"),
    ({"tokens": {"test": 99}}, "83 tokens of uint16, but meta.json says 99")))
def test_data_of_another_kind(folder, changes, message):
    damage(folder, **changes)
    with pytest.raises(UserError) as error:
        evaluate.main(["perplexity", "--device=cpu"])
    assert message in str(error.value)


@pytest.mark.parametrize("ids, message", (
    # the tokenizer's 257 ids are padded to 320, as train.py knows, too
    ([1, 2, 300, 3], "it holds id 300, the model has a vocabulary of 257"),
    ([1], "1 token, but a target needs one before it"),
    ([], "it is empty")))
def test_ids_that_cannot_be_scored(folder, ids, message):
    np.array(ids, "<u2").tofile("data/noise/test.bin")
    damage(folder, tokens={"test": len(ids)})
    with pytest.raises(UserError) as error:
        evaluate.main(["perplexity", "--device=cpu"])
    assert message in str(error.value)


def test_paper_study_of_vanilla(folder):
    save_model(folder / "vanilla", kv="vanilla")
    with pytest.raises(UserError, match="exact in one pass"):
        evaluate.main(["perplexity", "--out_dir=vanilla", "--solver=paper", "--device=cpu"])


def test_help(capsys):
    evaluate.main(["--help"])
    assert "commands: perplexity, downstream" in capsys.readouterr().out
    for command in ("perplexity", "downstream"):
        with pytest.raises(SystemExit) as leave:
            run(evaluate.main, [command, "--help"])
        assert leave.value.code == 0 and "--batch_size=" in capsys.readouterr().out


# ---- log-likelihoods of texts

EOS = 256
TRAINING = Schedule("training")


def scorer(schedule=TRAINING, dtype=torch.float64, tokenizer=None, **settings):
    model = small_model(dtype=dtype, **BYTES)
    return Scorer(model, tokenizer or get_tokenizer("bytes"), schedule, **settings)


def alone(s, ids, first):
    """Log-probability of ids[first:] and whether each is the likeliest: one row, no padding."""
    x = torch.tensor([ids[:-1]])
    logp = s.model.logits(s.schedule(s.model, x).final)[0].log_softmax(-1)
    targets = ids[first:]
    at = range(first - 1, len(ids) - 1)
    return (sum(logp[t, i].item() for t, i in zip(at, targets)),
            all(logp[t].argmax().item() == i for t, i in zip(at, targets)))


@torch.no_grad()
def test_an_empty_context_is_one_eos():
    s = scorer()
    for text in (" hello", "h", "<|endoftext|>", "  "):
        ids, first = s.encode("", text)
        assert ids == [EOS, *text.encode()] and first == 1
        (score,) = s.loglikelihood([("", text)])
        assert score == pytest.approx(alone(s, [EOS, *text.encode()], 1), rel=1e-10)
        assert math.isfinite(score[0])
    ids, first = s.encode("a", "b")
    assert (ids, first) == ([*b"ab"], 1)  # with a context there is no EOS
    assert s.encode(" \n", "b") == ([EOS, *b" \nb"], 1)  # nothing but space is none


def toy_bpe():
    """A byte-pair encoding with a few merges, split like GPT-2's."""
    merges = [b"th", b"he", b"the", b" t", b" the", b" s", b" i", b" is", b"in", b"er", b"re",
              b" b", b"bl", b"ue", b"ky", b" sky", b" bl", b" blue"]
    ranks = {bytes([i]): i for i in range(256)} | {m: 257 + n for n, m in enumerate(merges)}
    pattern = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    encoding = tiktoken.Encoding("toy", pat_str=pattern, mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": EOS})
    return from_encoding("toy", encoding)


@torch.no_grad()
def test_where_the_text_is_cut():
    s = scorer(tokenizer=toy_bpe())
    a, b = s.loglikelihood([("The sky is ", "blue"), ("The sky is", " blue")])
    assert a == b and s.encode("The sky is ", "blue") == s.encode("The sky is", " blue")
    assert s.loglikelihood([("x", ""), ("", "")]) == [(0.0, True), (0.0, True)]
    text = "The reader is in the blue sky, and there is the other reader, in the end"
    words = [i for i, c in enumerate(text) if c == " "]
    for cut in random.Random(0).choices(words, k=20):
        ids, first = s.encode(text[:cut], text[cut:])
        assert ids == s.tokenizer.encode(text)
        assert ids[:first] == s.tokenizer.encode(text[:cut])
        assert s.encode(text[:cut + 1], text[cut + 1:]) == (ids, first)  # the space moves over
    # a token that spans the cut belongs to the continuation
    the = s.tokenizer.encode("the")
    assert len(the) == 1 and s.encode("t", "he") == ([EOS, *the], 1)
    ids, first = s.encode("is t", "he")
    assert ids == s.tokenizer.encode("is the") and ids[first:] == s.tokenizer.encode(" the")


REQUESTS = [("The sky", " is blue"), ("a", "b"), ("", "x"), ("Twenty-five letters long", "!"),
            ("", "no context at all"), ("end. ", "And"), ("12345", "67")]


@torch.no_grad()
@pytest.mark.parametrize("schedule", (Schedule("training"), Schedule("cyclic", 1, 4, tol=1e-10)),
                         ids=lambda s: s.solver)
def test_scores_do_not_depend_on_the_batch(schedule):
    expected = None
    for dtype, tolerance in ((torch.float64, 1e-8), (torch.float32, 1e-4)):
        if dtype == torch.float32 and schedule.tol:
            schedule = Schedule("cyclic", 1, 4, tol=1e-5)
        for batch_size in (1, 2, 7):
            s = scorer(schedule, dtype, batch_size=batch_size)
            if expected is None:
                expected = [alone(s, *s.encode(*pair)) for pair in REQUESTS]
            order = random.Random(batch_size).sample(range(7), 7)
            scores = s.loglikelihood([REQUESTS[i] for i in order])
            for i, (nats, greedy) in zip(order, scores):
                assert nats == pytest.approx(expected[i][0], abs=tolerance)
                assert greedy == expected[i][1]


@torch.no_grad()
def test_documents_within_a_request():
    s = scorer(batch_size=3)
    rows = with_documents(random_tokens(4, 12, vocab_size=250), [3], [0, 7], [11], [5, 6])
    rows = [[EOS if i == 0 else i for i in row] for row in rows.tolist()]
    requests = list(zip(rows, (1, 5, 9, 12)))
    requests[1] = (rows[1][:9], 5)
    for (ids, first), score in zip(requests, s.score(requests)):
        expected = alone(s, ids, first) if first < len(ids) else (0.0, True)
        assert score == pytest.approx(expected, rel=1e-10)


@torch.no_grad()
def test_greedy_is_the_likeliest_continuation():
    s = scorer()
    ids = [*b"The"]
    for _ in range(4):
        ids.append(s.model.logits(solve(s.model, torch.tensor([ids])).final)[0, -1].argmax().item())
    other = [*ids[:-2], (ids[-2] + 1) % 256, ids[-1]]
    (_, greedy), (_, not_greedy) = s.score([(ids, 3), (other, 3)])
    assert greedy and not not_greedy
    # in pieces of 4: the last one alone is greedy
    s.max_length, ids = 4, [*b"Theory"]
    logits = s.model.logits(solve(s.model, torch.tensor([ids[2:]])).final)[0, -1]
    (_, last), (_, both) = s.score([(ids + [logits.argmax().item()], first) for first in (6, 2)])
    assert last and not both


def test_pieces_are_those_of_the_harness():
    """Its documented example: tokens 0..9 behind a prefix, four at a time."""
    ids = ["BOS", *range(10)]
    read = [(ids[start:stop - 1], ids[first:stop]) for start, first, stop in pieces(11, 1, 4)]
    assert read == [(["BOS", 0, 1, 2], [0, 1, 2, 3]), ([3, 4, 5, 6], [4, 5, 6, 7]),
                    ([5, 6, 7, 8], [8, 9])]
    assert pieces(5, 5, 4) == []
    assert pieces(9, 7, 4) == [(4, 7, 9)]  # a long context loses its beginning
    for n in range(2, 30):
        for first in range(1, n):
            cut = pieces(n, first, 6)
            assert [i for _, a, b in cut for i in range(a, b)] == list(range(first, n))
            assert all(0 <= start < a and b - 1 - start <= 6 for start, a, b in cut)


@torch.no_grad()
def test_longer_than_the_context():
    s = scorer(max_length=10)
    context, continuation = "a context of more than ten", " bytes"
    ids = [*(context + continuation).encode()]
    ((nats, greedy),) = s.loglikelihood([(context, continuation)])
    assert (nats, greedy) == pytest.approx(alone(s, ids[-11:], 5), rel=1e-10)
    text = "this one is scored in three pieces"
    ids = [EOS, *text.encode()]
    expected = (alone(s, ids[:11], 1)[0] + alone(s, ids[10:21], 1)[0] + alone(s, ids[20:31], 1)[0]
                + alone(s, ids[24:], 7)[0])
    assert len(ids) == 35
    assert s.loglikelihood_rolling([text, ""]) == pytest.approx([expected, 0.0], rel=1e-10)
    # a continuation longer than the context is cut alike
    assert s.loglikelihood([("", text)])[0][0] == pytest.approx(expected, rel=1e-10)


@torch.no_grad()
def test_generate_until():
    s = scorer(Schedule("cyclic", 9, 4), max_length=20)
    prompt, ids = [*b"The s"], []
    while len(ids) < 6:  # greedy, from the exact states
        h = autoregressive(s.model, torch.tensor([prompt + ids])).final
        ids.append(s.model.logits(h)[0, -1, :257].argmax().item())
    assert EOS not in ids
    text = s.tokenizer.decode(ids)
    assert s.generate_until("The s", [], 6) == text
    stop = text[2:4]
    assert s.generate_until("The s", ["never this", stop], 6) == text.partition(stop)[0]


def test_room_for_new_tokens(monkeypatch):
    """Of 20 tokens, 14 are left to the end of the context, but 10 at least; without one it is EOS.
    """
    prompts, s = [], scorer(max_length=20)
    monkeypatch.setattr(downstream, "generate", lambda model, p, n, *_, **__: prompts.append(
        (*p, n)) or [])
    for context, n in (("0123456789abcdefghij", 6), ("short", 6), ("", 6), ("xyz", 99),
                       ("0123456789abcdefghij", 99)):
        s.generate_until(context, [], n)
    assert prompts == [([*b"6789abcdefghij"], 6), ([*b"short"], 6), ([EOS], 6),
                       ([*b"xyz"], 17), ([*b"abcdefghij"], 10)]


# ---- the harness

@pytest.fixture
def harness(monkeypatch):
    """The parts of lm_eval that are used, as it documents them."""

    def simple_evaluate(model, tasks, num_fewshot, limit, task_manager, **_):
        assert num_fewshot == 0 and Path(task_manager.include_path).samefile(".")
        assert Path.cwd().name == "mine"
        request = [SimpleNamespace(args=pair) for pair in REQUESTS[:limit]]
        texts = [SimpleNamespace(args=(text,)) for text in ("one", "two more")]
        asks = [SimpleNamespace(args=("The s", {"until": ["x"], "max_gen_toks": 3}))]
        return {"results": {
            "piqa": {"alias": "piqa", "sample_len": 7, "acc,none": 0.5, "acc_norm,none": 0.25,
                     "acc_norm_stderr,none": "N/A", "scores": model.loglikelihood(request)[0][0]},
            "wikitext": {"word_perplexity,none": -sum(model.loglikelihood_rolling(texts)),
                         "sample_len": 2, "said": model.generate_until(asks)[0]},
            "group": {"alias": "group"}}}

    package = ModuleType("lm_eval")
    package.api, package.tasks = ModuleType("lm_eval.api"), ModuleType("lm_eval.tasks")
    package.api.model = ModuleType("lm_eval.api.model")
    package.api.model.LM = type("LM", (), {"__init__": lambda self: None})
    package.tasks.TaskManager = lambda include_path: SimpleNamespace(
        include_path=include_path, match_tasks=lambda names: [n for n in names if n != "other"])
    package.simple_evaluate = simple_evaluate
    for module in (package, package.api, package.api.model, package.tasks):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return package


@torch.no_grad()
def test_downstream_command(folder, harness, capsys):
    (folder / "mine").mkdir()
    argv = ["downstream", "--tasks=piqa, wikitext", "--task_dir=mine", "--device=cpu",
            "--limit=3", "--json=result.json", "--context=1024"]
    evaluate.main(argv)
    result = json.loads((folder / "result.json").read_text())
    s = scorer()
    assert list(result["results"]) == ["piqa", "wikitext"]
    piqa, wikitext = result["results"].values()
    assert piqa["examples"] == 7 and piqa["acc_norm"] == 0.25
    assert piqa["scores"] == pytest.approx(s.loglikelihood(REQUESTS[:1])[0][0], rel=1e-4)
    ppl = -sum(s.loglikelihood_rolling(["one", "two more"]))
    assert wikitext["word_perplexity"] == pytest.approx(ppl, rel=1e-4)
    assert result["schedule"] == {"solver": "training", "passes": 3, "n_groups": 4, "tol": None}
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["PIQA", "WikiText"] in lines and ["acc", "norm", "ppl"] in lines
    assert ["out", "25.00", f"{ppl:.2f}"] in lines
    assert ["paper:", "WhiteMatter", "k=16", "63.55", "43.28"] in lines
    with pytest.raises(UserError, match="tasks: other: not known to lm_eval, nor in mine"):
        evaluate.main([*argv, "--tasks=other"])


def test_paths_in_tasks_of_ones_own_start_from_their_folder(folder, harness, monkeypatch):
    """And not from the working folder, in which the results are written, whatever comes of it."""
    (folder / "mine").mkdir()
    (folder / "mine" / "texts.jsonl").touch()
    argv = ["downstream", "--tasks=piqa", "--task_dir=mine", "--device=cpu", "--json=result.json"]
    harness.tasks.TaskManager = lambda include_path: SimpleNamespace(
        match_tasks=lambda names: names if os.path.isdir(include_path) else [])
    results = {"piqa": {"acc,none": 0.5}}
    for data, error in (("texts.jsonl", None), ("data/texts.jsonl", UserError)):
        harness.simple_evaluate = lambda data=data, **_: (
            open(data).close() or {"results": results})
        with pytest.raises(error, match=data) if error else contextlib.nullcontext():
            evaluate.main(argv)
        assert Path.cwd() == folder
    assert (folder / "result.json").exists()


class Trap:
    def __reduce__(self):
        return print, ("this must never be run",)


@pytest.mark.parametrize("command", ("perplexity", "downstream"))
def test_checkpoints_that_run_code(folder, harness, capsys, command):
    torch.save({"model": {}, "trap": Trap()}, folder / "out" / "ckpt.pt")
    with pytest.raises(UserError, match="something other than tensors and plain values"):
        evaluate.main([command, "--device=cpu"])
    assert "never be run" not in capsys.readouterr().out



def test_what_the_harness_cannot_do(folder, harness, monkeypatch):
    def fail(**_):
        raise ConnectionError("no\nnetwork")

    harness.simple_evaluate = fail
    with pytest.raises(UserError, match=r"could not run them \(no network\)"):
        evaluate.main(["downstream", "--tasks=piqa", "--device=cpu"])

    def broken(**_):  # of a task's own, of any kind
        raise KeyError("nosplit") from ZeroDivisionError("why")

    harness.simple_evaluate = broken
    with pytest.raises(UserError, match=r"could not run them \(KeyError: why\)"):
        evaluate.main(["downstream", "--tasks=piqa", "--device=cpu"])
    harness.simple_evaluate = lambda model, **_: model.loglikelihood(5)
    with pytest.raises(TypeError, match="not iterable"):  # a mistake of ours
        evaluate.main(["downstream", "--tasks=piqa", "--device=cpu"])
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match="pip install lm_eval"):
        evaluate.main(["downstream", "--tasks=piqa", "--device=cpu"])


@pytest.mark.parametrize("settings, expected", (
    ({"until": ["a", "b"], "max_gen_toks": 9}, (["a", "b"], 9, 0.0)),
    ({"until": "a", "do_sample": False, "temperature": 0.7}, (["a"], 256, 0.0)),
    ({"do_sample": True, "temperature": 0.7}, ([], 256, 0.7)),
    ({"do_sample": True}, ([], 256, 1.0)),
    ({"until": ["", "a"], "temperature": None}, (["a"], 256, 0.0)),
    ({"temperature": 0.0}, ([], 256, 0.0)), ({"temperature": 0.5}, ([], 256, 0.5))), ids=str)
def test_generation_settings(settings, expected):
    assert downstream.generation(settings) == expected


TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: {kind}
doc_to_text: {text}
doc_to_target: {target}
"""
CHOICES = [("The sky", ["blue", " green and wide"], 0), ("One", ["two", "three"], 1),
           ("A long question about", ["it", "something else"], 0)]
DOCUMENTS = ["some words of a document", "and a few others"]


@torch.no_grad()
@pytest.mark.parametrize("batch_size", (1, 7))
def test_local_tasks_in_the_real_harness(folder, monkeypatch, batch_size):
    """Tasks from files of one's own, without a network, against scores added up by hand."""
    pytest.importorskip("lm_eval")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    (folder / "choices.jsonl").write_text("".join(
        json.dumps({"q": q, "c": c, "a": a}) + "\n" for q, c, a in CHOICES))
    (folder / "texts.jsonl").write_text("".join(json.dumps({"t": t}) + "\n" for t in DOCUMENTS))
    (folder / "choices.yaml").write_text(TASK.format(
        name="my_choices", file=folder / "choices.jsonl", kind="multiple_choice", text="q",
        target="a") + "doc_to_choice: c\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n")
    (folder / "texts.yaml").write_text(TASK.format(
        name="my_texts", file=folder / "texts.jsonl", kind="loglikelihood_rolling", text='""',
        target="t") + "metric_list:\n  - metric: word_perplexity\n  - metric: bits_per_byte\n")
    evaluate.main(["downstream", "--tasks=my_choices,my_texts", f"--task_dir={folder}",
                   "--device=cpu", "--context=16", f"--batch_size={batch_size}",
                   "--json=result.json"])
    found = json.loads((folder / "result.json").read_text())["results"]
    s = scorer(max_length=16)
    acc = norm = 0
    for question, choices, answer in CHOICES:
        nats = [alone(s, [*f"{question} {c}".encode()][-17:],
                      min(len(question), 17 - len(c) - 1))[0] for c in choices]
        acc += int(np.argmax(nats)) == answer
        norm += int(np.argmax([x / len(c) for x, c in zip(nats, choices)])) == answer
    assert found["my_choices"]["acc"] == pytest.approx(acc / 3)
    assert found["my_choices"]["acc_norm"] == pytest.approx(norm / 3)
    nats = -sum(s.loglikelihood_rolling(DOCUMENTS))
    words, n_bytes = (sum(map(len, parts)) for parts in
                      ([d.split() for d in DOCUMENTS], DOCUMENTS))
    assert found["my_texts"]["word_perplexity"] == pytest.approx(math.exp(nats / words), rel=1e-3)
    assert found["my_texts"]["bits_per_byte"] == pytest.approx(nats / n_bytes / math.log(2),
                                                               rel=1e-4)


@torch.no_grad()
def test_the_papers_formats_from_local_files(folder, monkeypatch):
    """LAMBADA, PIQA and WikiText as the harness asks them, from tests/tasks/, and from any folder:
    the paths in the tasks start from theirs."""
    pytest.importorskip("lm_eval")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    tasks = os.path.relpath(Path(__file__).with_name("tasks"))
    evaluate.main(["downstream", "--tasks=lambada_local,piqa_local,wikitext_local",
                   f"--task_dir={tasks}", "--device=cpu", "--context=1024",
                   "--json=result.json"])
    found = json.loads((folder / "result.json").read_text())["results"]
    s = scorer()

    def rows(name):
        return map(json.loads, open(f"{tasks}/{name}.jsonl", encoding="utf-8"))

    words = [row["text"].rpartition(" ") for row in rows("lambada")]
    nats = [s.loglikelihood([(text, " " + word)])[0][0] for text, _, word in words]
    assert found["lambada_local"]["perplexity"] == pytest.approx(
        math.exp(-sum(nats) / len(nats)), rel=1e-3)
    right = norm = 0
    for row in rows("piqa"):
        answers = [" " + row["sol1"], " " + row["sol2"]]
        nats = [x for x, _ in s.loglikelihood([(f"Question: {row['goal']}\nAnswer:", a)
                                               for a in answers])]
        right += int(np.argmax(nats)) == row["label"]
        norm += int(np.argmax([x / (len(a) - 1) for x, a in zip(nats, answers)])) == row["label"]
    assert found["piqa_local"]["acc"] == pytest.approx(right / 5)
    assert found["piqa_local"]["acc_norm"] == pytest.approx(norm / 5)
    pages = [row["page"] for row in rows("wikitext")]
    n_words = sum(len(re.split(r"\s+", page)) for page in pages)
    assert found["wikitext_local"]["word_perplexity"] == pytest.approx(
        math.exp(-sum(s.loglikelihood_rolling(pages)) / n_words), rel=1e-3)


@pytest.mark.parametrize("more, context", [([], 8), (["--context=12"], 12)])
def test_downstream_reads_no_more_context_than_was_trained(folder, harness, capsys, more, context):
    """Unless more is asked for, which is said: positions beyond were never trained."""
    (folder / "mine").mkdir()
    evaluate.main(["downstream", "--device=cpu", "--tasks=piqa", "--task_dir=mine", "--limit=1",
                   f"--json={folder}/r.json", *more])
    assert json.loads((folder / "r.json").read_text())["context"] == context
    assert ("block_size=8 of training" in capsys.readouterr().out) == (context > 8)
