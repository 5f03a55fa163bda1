"""documents.py: file formats, and downloads from a server that breaks off and refuses."""

import errno
import gzip
import http.server
import importlib.util
import json
import os
import sys
import threading
from pathlib import Path

import pytest
import requests
from builders import MERGES, tokenizer_json

import prepare_data
from configurator import UserError
from running.lock import Lock
from text import documents, tokenizer
from text.documents import Documents, fetch, find_files, fineweb_edu


def texts_of(*files: Path) -> list[str]:
    return ["".join(document) for document in Documents(files)]


def jsonl(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


# --- files


def test_gzip_and_plain_files_hold_the_same_documents(tmp_path):
    book = "naïve 中文\r\n" * 100_000  # longer than a piece, its characters lie across pieces
    lines = jsonl("one", "two\nlines", "", "🙂")
    for name, data in (("a.txt", book.encode()), ("b.jsonl", lines)):
        (tmp_path / name).write_bytes(data)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(data))
    for ending in ("", ".gz"):
        found = texts_of(tmp_path / f"a.txt{ending}", tmp_path / f"b.jsonl{ending}")
        assert found == [book, "one", "two\nlines", "", "🙂"]


def test_reading_tells_how_far_it_has_come(tmp_path):
    for name in ("a.jsonl", "b.jsonl.gz"):
        data = jsonl(*["some text"] * 20_000)
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    source = Documents(sorted(tmp_path.iterdir()))
    shares = [source.done() / source.size for _ in source]
    assert shares == sorted(shares) and shares[0] < 0.5 and 0.4 < shares[10_000] < 0.6
    assert source.done() == source.size


def test_files_are_named_by_lists_folders_and_globs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.txt", "b/1.jsonl.gz", "b/c/3.txt.gz", "b/no.md", "a.txt", "x,y.txt",
                 "b/.git/4.txt", "b/._2.txt", ".h/5.txt", "B/6.TXT", "B/7.Jsonl.GZ"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found = {names: [str(p) for p in find_files(names)] for names in
             ("b", "a.txt, b/*.txt", "b/**/*.gz", "x,y.txt", "a.txt,a.txt", "b/*",
              ".h", "b/._2.txt", "B")}
    assert found == {
        "b": ["b/1.jsonl.gz", "b/2.txt", "b/c/3.txt.gz"],
        "a.txt, b/*.txt": ["a.txt", "b/2.txt"],
        "b/**/*.gz": ["b/1.jsonl.gz", "b/c/3.txt.gz"],
        "x,y.txt": ["x,y.txt"],
        "a.txt,a.txt": ["a.txt"],
        "b/*": ["b/1.jsonl.gz", "b/2.txt", "b/c/3.txt.gz"],
        ".h": [".h/5.txt"], "b/._2.txt": ["b/._2.txt"],  # hidden ones, by their names alone
        "B": ["B/6.TXT", "B/7.Jsonl.GZ"],
    }
    for names, message in (("z*.txt", "z[*].txt does not exist"), (",", "names no file"),
                           ("b/no.md", "no.md is or holds no")):
        with pytest.raises(UserError, match=message):
            find_files(names)
    for names, name in (("b", "b"), ("b/2.txt", "2"), ("b/1.jsonl.gz", "1"), ("b/*.gz", "b"),
                        ("B/6.TXT", "6")):
        assert prepare_data.dataset_name(names, find_files(names)[0]) == name


def test_links_are_followed_once_and_what_cannot_be_read_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("in/a.txt", "in/closed/c.txt", "elsewhere/b.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    try:
        Path("in/more").symlink_to("../elsewhere")
        Path("in/up").symlink_to("..")
        Path("in/z.txt").symlink_to("a.txt")
    except OSError:
        pytest.skip("no links here")
    assert [p.name for p in find_files("in,in/../in/a.txt")] == ["a.txt", "c.txt", "b.txt"]
    real = os.scandir

    def scandir(path):
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    with monkeypatch.context() as m:
        m.setattr(os, "scandir", scandir)
        with pytest.raises(UserError, match="--input: .*closed: Permission denied"):
            find_files("in")
    Path("in/lost.txt").symlink_to("nowhere.txt")
    with pytest.raises(UserError, match="--input: in/lost.txt is a link to a file that is not"):
        find_files("in")


@pytest.mark.parametrize("damage", [lambda b: b[:-20], lambda b: b[:200] + b"xx" + b[202:],
                                    lambda b: b"no gzip"])
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz"])
def test_a_damaged_gzip_file_is_named(tmp_path, name, damage):
    whole = gzip.compress(jsonl(*map(str, range(10_000))))
    (tmp_path / name).write_bytes(damage(whole))
    with pytest.raises(UserError, match=f"{name} is damaged"):
        texts_of(tmp_path / name)


def test_a_bad_line_inside_gzip_has_its_number(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl("one", "two") + b"{oops\n"))
    with pytest.raises(UserError, match="a.jsonl.gz, line 3: not JSON"):
        texts_of(tmp_path / "a.jsonl.gz")


def test_parquet_without_pyarrow_is_one_clear_message(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(UserError, match="parquet files need pyarrow: pip install pyarrow"):
        find_files(str(tmp_path))
    with pytest.raises(UserError, match="pip install pyarrow"):
        prepare_data.main(["fineweb-edu", "--tokenizer=bytes", f"--out_dir={tmp_path / 'out'}",
                           "--base_url=http://127.0.0.1:9"])


def write_parquet(path: Path, texts: list, column: str = "text") -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"n": list(range(len(texts))), column: texts})
    parquet.write_table(table, path, row_group_size=100)


def test_parquet_rows_are_documents(tmp_path):
    texts = [f"text {i} 中文" * (i % 7) for i in range(1000)]
    write_parquet(tmp_path / "a.parquet", [*texts, None])
    assert texts_of(tmp_path / "a.parquet") == [*texts, ""]


def test_what_is_no_text_is_replaced_counted_and_named_in_every_format(tmp_path, capsys):
    """Half a surrogate: https://github.com/openai/tiktoken/issues/82, a byte:
    https://github.com/jingyaogong/minimind/issues/551"""
    (tmp_path / "a.txt").write_bytes(b"x" * 2**18 + b"\n\nna\xefve " + "é🙂".encode() + b"\xc3")
    (tmp_path / "b.jsonl").write_bytes(
        rb'{"text": null}' b"\n" rb'{"text": "a\ud83d b \ud83d\ude42"}' b'\n{"text": "a\xefb"}\n')
    rows = ["", "a\ufffd b 🙂", "a\ufffdb"]
    for name, texts, where in (
            ("a.txt", ["x" * 2**18 + "\n\nna\ufffdve é🙂\ufffd"], "a.txt, line 3"),
            ("b.jsonl", rows, "b.jsonl, line 2")):
        source = Documents([tmp_path / name])
        assert ["".join(d) for d in source] == texts
        assert source.replaced == 2 and source.first.endswith(where)
    prepare_data.main([f"--input={tmp_path}", f"--out_dir={tmp_path / 'out'}"])
    said = capsys.readouterr().out
    assert "3 documents, 1 empty" in said and "note: 4 characters were no text" in said
    for name, encoding in (("c.txt", "utf-16"), ("c.jsonl", "utf-16"), ("d.txt", "utf-32")):
        (tmp_path / name).write_text('{"text": "twice as many bytes"}', encoding=encoding)
        with pytest.raises(UserError, match=f"{name} is UTF-16 or UTF-32, not UTF-8"):
            texts_of(tmp_path / name)


def test_a_zero_is_no_text(tmp_path):
    """UTF-16 without a mark of its byte order is full of them, and so are binary files."""
    (tmp_path / "a.TXT").write_bytes(b"a\n" + "bc".encode("utf-16-le"))
    (tmp_path / "b.JSONL").write_bytes(rb'{"text": "a\u0000"}')
    for name, text, where in (("a.TXT", "a\nb\ufffdc\ufffd", "a.TXT, line 2"),
                              ("b.JSONL", "a\ufffd", "b.JSONL, line 1")):
        source = Documents([tmp_path / name])
        assert ["".join(d) for d in source] == [text]
        assert source.replaced == text.count("\ufffd") and source.first.endswith(where)


def test_a_parquet_string_that_is_not_utf8_is_replaced_too(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = pyarrow.array([b"good", None, b"na\xefve"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    source = Documents([tmp_path / "a.parquet"])
    assert ["".join(d) for d in source] == ["good", "", "na\ufffdve"]
    assert source.replaced == 1 and source.first.endswith("a.parquet, row 3")


def test_parquet_of_another_kind_is_named(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["x"], column="body")
    with pytest.raises(UserError, match='a.parquet: wanted one column "text" .* body: string'):
        texts_of(tmp_path / "a.parquet")
    write_parquet(tmp_path / "b.parquet", [1, 2])
    with pytest.raises(UserError, match='b.parquet: wanted one .* strings, not .*text: int64'):
        texts_of(tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no more PAR1")
    packed = gzip.compress((tmp_path / "b.parquet").read_bytes())
    (tmp_path / "d.parquet.gz").write_bytes(packed[:-20])
    (tmp_path / "e.parquet.gz").write_bytes(packed[:40] + b"\xff" * 40 + packed[80:])
    for name, wrong in (("c.parquet", "no parquet file or damaged"), ("d.parquet.gz", "damaged:"),
                        ("e.parquet.gz", "damaged:")):
        with pytest.raises(UserError, match=f"{name} is {wrong}"):
            texts_of(tmp_path / name)


# --- the network


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`, and notes what it is `asked`."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.cuts: list[int] = []  # bytes of the next bodies, after which it hangs up
        self.errors: list[int] = []  # status codes of the next answers
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/data"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.asked.append(self.path)
        data = server.files.get(self.path)
        if server.errors or data is None:
            self.send_error(server.errors.pop(0) if server.errors else 404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:server.cuts.pop(0) if server.cuts else None])

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(documents, "PAUSE", 0.001)
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


DATA = bytes(range(256)) * 4096  # 1 MiB


def get(server: Server, path: Path, **options) -> list[tuple]:
    return list(fetch(f"{server.url}/a", path, DATA[:9], DATA[-7:], **options))


def test_a_download_that_breaks_off_is_tried_again(tmp_path, server):
    server.files["/data/a"], server.cuts = DATA, [600_000, 0]
    steps = get(server, tmp_path / "a", tries=3)
    assert (tmp_path / "a").read_bytes() == DATA and len(server.asked) == 3
    assert sum(new for new, _ in steps) > len(DATA) and steps[-1][1] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_a_later_run_begins_a_part_again(tmp_path, server):
    server.files["/data/a"], server.cuts = DATA, [300_000]
    with pytest.raises(UserError, match="/data/a: .*300000 bytes read.*gave up"):
        get(server, tmp_path / "a", tries=1)
    assert [p.name for p in tmp_path.iterdir()] == ["a.part"]
    get(server, tmp_path / "a", tries=1)
    assert (tmp_path / "a").read_bytes() == DATA


def test_an_overloaded_server_is_asked_again_and_a_refusal_is_final(tmp_path, server):
    server.files["/data/a"] = DATA
    server.errors = [503, 429, 500]
    get(server, tmp_path / "a")
    assert len(server.asked) == 4 and (tmp_path / "a").read_bytes() == DATA
    with pytest.raises(UserError, match="/data/b: 404"):
        list(fetch(f"{server.url}/b", tmp_path / "b", b"", b""))
    assert len(server.asked) == 5 and not (tmp_path / "b.part").exists()
    server.errors = [503] * 9
    with pytest.raises(UserError, match="503.*gave up"):
        get(server, tmp_path / "c", tries=3)
    assert len(server.asked) == 8


def test_nobody_there_is_an_error_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PAUSE", 0.001)
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(UserError, match="http://127.0.0.1:9/x: .*refused.*gave up"):
        list(fetch("http://127.0.0.1:9/x", tmp_path / "x", b"", b"", tries=2))


def test_shards_that_are_there_are_not_downloaded_again(tmp_path, server):
    for i in range(3):
        server.files[f"/data/shard_0000{i}.parquet"] = b"PAR1" + DATA[:992 + i] + b"PAR1"
    (tmp_path / "shard_00001.parquet").write_bytes(b"mine")
    shown: list[tuple] = []
    paths = fineweb_edu(tmp_path, 3, server.url + "/", lambda *step: shown.append(step))
    sizes = [p.stat().st_size for p in paths]
    assert sizes == [1000, 4, 1002] and paths[1].read_bytes() == b"mine"
    assert shown == [(1 / 2, 1000), (1, 2002)] and len(server.asked) == 2


@pytest.mark.parametrize("page", [b"<html>Who are you?</html>", b"PAR", b"PAR1 but cut"])
def test_what_is_not_what_was_asked_for_is_not_kept(tmp_path, server, page):
    """A network that wants a login first answers with a page."""
    server.files["/data/shard_00000.parquet"] = page
    with pytest.raises(UserError, match=f"shard_00000.parquet: {len(page)} bytes.*no parquet file"):
        fineweb_edu(tmp_path, 1, server.url, lambda *step: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("problem", "message"), [
    (KeyboardInterrupt(), "interrupted; the same command goes on with the download"),
    (OSError(errno.ENOSPC, "No space left on device"), "shards: No space left on device"),
])
def test_a_download_that_is_stopped_is_one_message(tmp_path, monkeypatch, problem, message):
    class Response:
        headers = {"Content-Length": "9"}

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def raise_for_status(self):
            pass

        def iter_content(self, size):
            raise problem

    monkeypatch.setattr(prepare_data, "import_parquet", lambda: None)
    monkeypatch.setattr(requests, "get", lambda *args, **options: Response())
    with pytest.raises(UserError, match=message):
        prepare_data.main(["fineweb-edu", "--tokenizer=bytes", f"--out_dir={tmp_path}"])


def test_the_papers_corpus_from_shards_to_splits(tmp_path, server, capsys):
    shard = tmp_path / "shard.parquet"
    for i in range(2):
        write_parquet(shard, [f" {i}-{n} " + "word " * (n % 50) for n in range(400)])
        server.files[f"/data/shard_0000{i}.parquet"] = shard.read_bytes()
    out = tmp_path / "out"
    prepare_data.main(["fineweb-edu", "--tokenizer=bytes", "--shards=2", f"--base_url={server.url}",
                       f"--out_dir={out}", "--test_rows=3", "--val_rows=2"])
    meta = json.loads((out / "meta.json").read_text(encoding="utf-8"))
    assert (meta["tokens"]["test"], meta["tokens"]["val"]) == (3 * 2048, 2 * 2048)
    text = bytes((out / "train.bin").read_bytes()[::2]).decode("latin-1")
    documents_of_train = text.split("\0")[:-1]  # the low byte of EOS
    assert documents_of_train[0] == "0-20 " + ("word " * 20).strip()  # the first of 100 characters
    assert min(map(len, documents_of_train)) >= 100
    assert "under 100 characters skipped" in capsys.readouterr().out
    assert sorted(p.name for p in (out / "shards").iterdir()) == \
        [".lock", "shard_00000.parquet", "shard_00001.parquet"]


def test_qwen3_is_downloaded_once(tmp_path, server, monkeypatch):
    pytest.importorskip("tokenizers")
    server.files["/data/tokenizer.json"] = json.dumps(tokenizer_json(MERGES)).encode()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenizer, "QWEN_URL", f"{server.url}/tokenizer.json")
    monkeypatch.setattr(tokenizer, "QWEN_EOS", 406)
    monkeypatch.setattr(tokenizer, "QWEN_ROWS", 407)
    for _ in range(2):
        assert tokenizer.get_tokenizer("qwen3").vocab_size == 407
    assert len(server.asked) == 1


@pytest.mark.parametrize("page", [b"<html>Who are you?</html>", b"[1]"])
def test_what_is_no_tokenizer_is_not_kept_as_qwen3s(tmp_path, server, monkeypatch, page):
    server.files["/data/tokenizer.json"] = page
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenizer, "QWEN_URL", f"{server.url}/tokenizer.json")
    with pytest.raises(UserError, match=f"'qwen3' .*{len(page)} bytes came, but of no json file"):
        tokenizer.get_tokenizer("qwen3")
    assert not list((tmp_path / "cache").iterdir())


def test_two_downloads_do_not_share_a_folder(tmp_path, monkeypatch):
    pytest.importorskip("fcntl")
    monkeypatch.setattr(prepare_data, "import_parquet", lambda: None)
    lock = Lock(tmp_path / "shards")
    with pytest.raises(UserError, match="shards: another run is writing there"):
        prepare_data.main(["fineweb-edu", "--tokenizer=bytes", f"--out_dir={tmp_path}"])
    lock.close()
