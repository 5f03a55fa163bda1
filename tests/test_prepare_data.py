"""prepare_data.py: the files hold the text and nothing else. Numbers are those of real reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiktoken

import prepare_data
from configurator import UserError
from prepare_data import get_tokenizer, main, pieces, prepare_python

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
    out = prep(write_jsonl(tmp_path / "a.jsonl", texts), "--val_fraction=0")
    assert read_texts(out) == texts
    raw = (out / "train.bin").read_bytes()
    assert raw[:6] == b"o\0n\0e\0"  # little endian, two bytes per token
    assert json.loads((out / "meta.json").read_text(encoding="utf-8")) == {
        "tokenizer": "bytes",
        "vocab_size": 257,
        "eos_id": EOS,
        "dtype": "uint16",
        "tokens": {"train": len(raw) // 2, "val": 0, "test": 0},
    }
    assert sorted(os.listdir(out)) == ["meta.json", "train.bin"]


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


def test_splits_are_whole_documents_and_copies_stay_on_one_side(tmp_path):
    texts = [f"document {i % 50}" for i in range(200)]
    out = prep(write_jsonl(tmp_path / "a.jsonl", texts), "--val_fraction=0.3")
    train, val = read_texts(out), read_texts(out, "val")
    assert sorted(train + val) == sorted(texts)
    assert 20 < len(val) < 100 and not set(train) & set(val)


@pytest.mark.parametrize("count", [2, 3, 10])
def test_small_corpora_still_have_train_and_val(tmp_path, count):
    texts = [f"text {i}" for i in range(count)]
    for seed in range(5):
        out = prep(write_jsonl(tmp_path / "a.jsonl", texts), f"--seed={seed}")
        assert sorted(read_texts(out) + read_texts(out, "val")) == texts


def test_one_long_text_gives_its_end_to_val(tmp_path):
    source = tmp_path / "book.txt"
    source.write_text("It was a dark and stormy night.\n" * 1000, encoding="utf-8")
    out = prep(source, "--val_fraction=0.1")
    (train,), (val,) = read_texts(out), read_texts(out, "val")
    assert train + val == source.read_text(encoding="utf-8")
    assert train[-1].isspace() and abs(len(val) - 3200) < 32


def test_test_rows_are_the_last_tokens_and_share_no_document_with_train(tmp_path):
    texts = [f"{i:03d}" * 50 for i in range(100)]  # 151 tokens each
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    whole = read_ids(prep(source, "--val_fraction=0"))
    out = prep(source, "--val_fraction=0", "--test_rows=3")
    np.testing.assert_array_equal(read_ids(out, "test"), whole[-3 * 2048 :])
    assert read_texts(out) == texts[: (100 * 151 - 3 * 2048) // 151]
    with pytest.raises(UserError, match="16384.*15100"):
        prep(source, "--val_fraction=0", "--test_rows=8")


# --- tokenizers


def test_the_byte_tokenizer_returns_every_text_and_every_id(tmp_path):
    tokenizer = get_tokenizer("bytes")
    text = "naïve – 中文 🙂 \x00 e\u0301"
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, EOS)
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode_bytes(np.arange(256)) == bytes(range(256))
    assert tokenizer.decode_bytes([65, EOS, 66]) == b"AB"
    assert tokenizer.decode_bytes([300, -1]) == b"\xef\xbf\xbd" * 2
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_pieces_encode_like_the_whole():
    # a table with tokens of white space and marks, where a cut in the wrong place would show
    ranks = {bytes([i]): i for i in range(256)}
    for pair in ["  ", "\n\n", " \n", "!\n", "\n/", "    ", "\n\n\n\n", " a", "a!", "aa", "\r\n"]:
        ranks[pair.encode()] = len(ranks)
    words = ["a", "aa", "!", "/", " ", "  ", "\n", "\n\n", "\r\n", " \n", "a!", "é", "_", "'s", "1"]
    rng = np.random.default_rng(0)
    text = "".join(rng.choice(words, 40_000))
    gpt2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    later = (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
        r"| ?[^\s\p{L}\p{N}]++[\r\n/]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
    )
    for pattern in [gpt2, later]:
        encoding = tiktoken.Encoding(
            "test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
        )
        cut = list(pieces([text[:1500], text[1500:]], 400))
        assert "".join(cut) == text and max(map(len, cut)) <= 400
        ids = [token for piece in cut for token in encoding.encode_ordinary(piece)]
        assert ids == encoding.encode_ordinary(text)


def test_case_4_a_tokenizer_that_cannot_be_downloaded_is_one_clear_line(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["hello"])
    offline = "http://127.0.0.1:9"  # nobody listens there
    start = time.monotonic()
    result = prep_process(
        f"--input={source}", "--tokenizer=gpt2", f"--out_dir={tmp_path / 'out'}",
        TIKTOKEN_CACHE_DIR=str(tmp_path / "cache"), HTTPS_PROXY=offline, https_proxy=offline,
    )  # fmt: skip
    assert result.returncode != 0 and time.monotonic() - start < 30
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1
    for word in ["gpt2", "TIKTOKEN_CACHE_DIR", "--tokenizer=bytes"]:
        assert word in result.stderr
    assert not (tmp_path / "out").exists()


def test_case_4_a_network_that_never_answers_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(prepare_data, "LOAD_SECONDS", 0.05)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: time.sleep(1))
    with pytest.raises(UserError, match="gpt2.*no answer.*--tokenizer=bytes"):
        get_tokenizer("gpt2")


def test_an_unknown_tokenizer_is_named_with_the_nearest():
    with pytest.raises(UserError, match="'gpt-2'.*did you mean gpt2"):
        get_tokenizer("gpt-2")


# --- odd text


def test_case_6_a_spelled_out_control_token_is_text(tmp_path):
    texts = ["A <|endoftext|> B", "C"]
    out = prep(write_jsonl(tmp_path / "a.jsonl", texts), "--val_fraction=0")
    assert (read_ids(out) == EOS).sum() == 2
    assert read_texts(out) == texts


def test_case_8_empty_documents_are_skipped_and_counted(tmp_path, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", ["", "  \n", "hello", ""])
    out = prep(source, "--val_fraction=0")
    assert read_texts(out) == ["hello"]
    assert "1 documents, 3 empty" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_case_8_a_corpus_of_nothing_is_an_error(tmp_path, name):
    for content in ["", '{"text": " "}\n' if name == "a.jsonl" else " \n\u3000" * 200_000]:
        (tmp_path / name).write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match="no text"):
            prep(tmp_path / name)
        assert not (tmp_path / "out").exists()


def test_case_9_every_document_ends_with_the_eos_of_the_meta_data(tmp_path):
    out = prep(write_jsonl(tmp_path / "a.jsonl", ["a", "b", "c"]), "--val_fraction=0")
    assert list(read_ids(out)) == [97, EOS, 98, EOS, 99, EOS]
    assert json.loads((out / "meta.json").read_text(encoding="utf-8"))["eos_id"] == EOS


def test_case_12_long_runs_without_spaces_take_seconds(tmp_path):
    source = tmp_path / "run.txt"
    lines = ["^" * 1_000_000, "a" * 200_000, "ok"]
    source.write_text("\n".join(lines), encoding="utf-8")
    start = time.monotonic()
    out = prep(source, "--val_fraction=0")
    assert time.monotonic() - start < 20
    assert read_texts(out) == ["\n".join(lines)]


def test_case_13_the_encoding_of_the_platform_does_not_matter(tmp_path):
    source = tmp_path / "a.txt"
    source.write_bytes("naïve – 中文".encode())
    here = files_under(prep(source))
    result = prep_process(
        f"--input={source}", f"--out_dir={tmp_path / 'c'}", PYTHONUTF8="0", LC_ALL="C",
        PYTHONCOERCECLOCALE="0",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert files_under(tmp_path / "c") == here


# --- errors


@pytest.mark.parametrize(
    "line", ["{", '{"text": 1}', '{"txt": "a"}', "[]", '"text"', "\\xff", '{"text": null}']
)
def test_a_bad_line_is_reported_with_file_and_number_and_leaves_nothing(tmp_path, line):
    source = write_jsonl(tmp_path / "good.jsonl", ["good"] * 3)
    out = prep(source)
    before = files_under(out)
    source.write_text('{"text": "other"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"good.jsonl, line 3"):
        prep(source)
    assert files_under(out) == before and sorted(os.listdir(out)) == sorted(before)


def test_text_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin.txt is not UTF-8"):
        prep(tmp_path / "latin.txt")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--input=nowhere"], "nowhere does not exist"),
        ([f"--input={__file__}"], "no .txt or .jsonl"),
        (["--val_fraction=1"], "val_fraction=1"),
        (["--val_fraction=-0.1"], "val_fraction=-0.1"),
        (["--test_rows=-1"], "test_rows=-1"),
        (["--inptu=a.txt"], "input"),
    ],
)
def test_bad_options_are_named(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        main([f"--out_dir={tmp_path / 'out'}", *options])
    assert not (tmp_path / "out").exists()


def test_a_second_run_replaces_all_of_the_first(tmp_path):
    prep(write_jsonl(tmp_path / "a.jsonl", ["a" * 99] * 100), "--val_fraction=0", "--test_rows=1")
    out = prep(write_jsonl(tmp_path / "a.jsonl", ["b", "c"]))
    assert sorted(os.listdir(out)) == ["meta.json", "train.bin", "val.bin"]


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


def test_the_command_without_arguments_gives_the_same_bytes(python_data, tmp_path):
    main([f"--out_dir={tmp_path}"])
    assert files_under(tmp_path) == files_under(python_data)


def test_a_python_without_sources_still_has_its_topics(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    prepare_python(str(tmp_path / "out"))
    assert len(read_texts(tmp_path / "out")) > 30
