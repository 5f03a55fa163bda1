"""Command lines: what is accepted, and how an end is told that the user can mend."""

import dataclasses
import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import refused

import prepare_data
from configurator import UserError, explained, joined, less_memory, parse, run, run_command, session
from measure.timing import write_json
from running.devices import pick_device, pick_dtype
from sample import SampleConfig
from train import TrainConfig

ROOT = Path(__file__).parent.parent


def test_settings_override_in_both_orders_and_convert(tmp_path):
    path = tmp_path / "c.py"
    path.write_text("import math\n_note = 3\nbatch_size = 5\nlearning_rate = 1\ncompile = False\n")
    for argv in ([str(path), "--batch_size=7"], ["--batch_size=7", str(path)]):
        c = parse(TrainConfig(), argv, "")
        assert (c.batch_size, c.learning_rate, c.compile) == (7, 1.0, False)
        assert type(c.learning_rate) is float
    for text, value in (("0", False), ("false", False), ("no", False), ("True", True), ("1", True)):
        assert parse(TrainConfig(), [f"--compile={text}"], "").compile is value
    for text in ("1", "1e-3"):
        assert parse(TrainConfig(), [f"--learning_rate={text}"], "").learning_rate == float(text)
    assert pick_dtype("bf16", "cpu") == torch.bfloat16
    assert pick_device("cpu:0") == "cpu"
    path.write_text("from math import pi as _pi, sqrt\nfrom functools import lru_cache\n"
                    "@lru_cache\ndef f(): return 4\nbatch_size = f()\n")
    assert parse(TrainConfig(), [str(path)], "").batch_size == 4
    (tmp_path / "seven.txt").write_text("7")
    path.write_text("from __future__ import annotations\nimport os as _os\n"
                    "batch_size = int(open(_os.path.dirname(__file__) + '/seven.txt').read())\n")
    assert parse(TrainConfig(), [str(path)], "").batch_size == 7
    path.write_text("import json as wandb\nlearning_rate = lambda step: 1e-3\n")
    with pytest.raises(UserError, match="learning_rate = <function .*>: expected a number"):
        parse(TrainConfig(), [str(path)], "")


def test_a_key_of_a_kind_that_no_command_line_can_write_is_named():
    for kind in (tuple[int, ...], list[int], int | str, dict):
        c = dataclasses.make_dataclass("Config", [("windows", kind, None)])()
        with pytest.raises(UserError, match="windows=1,2: a key is of bool, int, float, str, or"):
            parse(c, ["--windows=1,2"], "")


def test_none_is_a_word_where_text_is_wanted():
    for text, stop in (("none", "none"), ("None", None), ("", "")):
        assert parse(SampleConfig(), [f"--stop={text}"], "").stop == stop


def test_a_blank_serves_as_well_as_an_equals_sign(tmp_path):
    path = tmp_path / "c.py"
    path.write_text("batch_size = 5\n")
    c = parse(TrainConfig(), ["--block_size", "32", "--wandb", str(path), "--kernels", "false",
                              "--n-grad", "none", "--compile", "--out_dir", "-x"], "")
    assert (c.block_size, c.batch_size, c.wandb, c.kernels, c.n_grad, c.compile, c.out_dir) == (
        32, 5, True, False, None, True, "-x")
    assert parse(c, ["--compile", "None"], "").compile is None
    assert joined(["--dataset", "--seed", "3", "a"], c) == ["--dataset", "--seed=3", "a"]
    with pytest.raises(UserError, match="--dataset needs a value: --dataset=python"):
        parse(TrainConfig(), ["--dataset", "--seed", "3"], "")


@pytest.mark.parametrize("argv, words", [
    (["--lerning_rate=1"], ["lerning_rate", "did you mean learning_rate"]),
    (["--batch_size=4.5"], ["--batch_size=4.5", "whole number"]),
    (["--batch_size", "four"], ["--batch_size=four", "whole number"]),
    (["--compile=maybe"], ["--compile=maybe", "true or false"]),
    (["--grad_clip=x"], ["--grad_clip=x", "a number"]),
    (["--seed"], ["--seed needs a value: --seed=1337"]),
    (["--seed=99999999999999999999"], ["seed", "whole number of 63 bits"]),
    (["nowhere.py"], ["nowhere.py: no such config file"]),
    (["latin.py"], ["latin.py: cannot read this file as UTF-8"]),
    (["typo.py"], ["typo.py: lerning_rate", "learning_rate"]),
    (["old.py"], ["old.py: eval_iters", "eval_iters is eval_rows now", "not batches"]),
    (["broken.py"], ["broken.py, line 2", "ZeroDivisionError"])])
def test_a_setting_that_is_none_is_one_clear_line(tmp_path, monkeypatch, capsys, argv, words):
    monkeypatch.chdir(tmp_path)
    Path("latin.py").write_bytes(b"# \xff\n")
    Path("typo.py").write_text("lerning_rate = 1\n")
    Path("old.py").write_text("eval_iters = 1\n")
    Path("broken.py").write_text("a = 1\n1 / 0\n")
    refused(argv, capsys, *words, main=lambda argv: parse(TrainConfig(), argv, ""))


@pytest.mark.parametrize("error", [
    RuntimeError("[enforce fail at alloc_cpu.cpp:129] err == 0. DefaultCPUAllocator: can't "
                 "allocate memory: you tried to allocate 4000000000000 bytes. Error code 12"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:116] data. DefaultCPUAllocator: not enough "
                 "memory: you tried to allocate 9 bytes."),
    RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"), MemoryError(),
    np._core._exceptions._ArrayMemoryError((10 ** 12,), np.dtype("f4")),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")], ids=str)
def test_no_memory_is_told_with_numbers_that_work(capsys, error):
    def main(argv):
        parse(TrainConfig(batch_size=16, gradient_accumulation_steps=1), [], "")
        raise error

    refused([], capsys, "out of memory: --batch_size=8 --gradient_accumulation_steps=2 takes less "
            "for the same result", main=main)


def test_the_allocator_of_a_cpu_is_understood(capsys):
    refused([], capsys, "out of memory", main=lambda _: torch.empty(10 ** 17))
    refused([], capsys, "out of memory", main=lambda _: torch.empty(2 ** 62))


def test_less_memory_is_the_same_step_where_there_is_one():
    assert less_memory(TrainConfig(batch_size=9, gradient_accumulation_steps=2)).startswith(
        "--batch_size=3 --gradient_accumulation_steps=6 ")
    assert less_memory(TrainConfig(batch_size=1, block_size=64)).startswith("--block_size=32 ")
    assert " otherwise --max_new_tokens=250 takes less;" in less_memory(SampleConfig(num_samples=2))
    assert less_memory(None).startswith("a smaller model")


@pytest.mark.parametrize("error, words", [
    (RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
     "--compile=false"),
    (type("InvalidCxxCompiler", (RuntimeError,), {})("No working C++ compiler found"),
     "--compile=false"),
    (OSError(errno.ENOSPC, "No space left on device", "x.json"), "x.json: cannot be written"),
    (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), "full?"),
    (UserError("two"), "two")], ids=str)
def test_what_a_user_can_mend_is_told(error, words):
    assert words in explained(error)


def test_a_mistake_of_ours_keeps_its_traceback():
    for error in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), KeyError("x"),
                  FileNotFoundError(errno.ENOENT, "No such file")):
        assert explained(error) is None
        with pytest.raises(type(error)):
            run(lambda _, error=error: (_ for _ in ()).throw(error), [])


def script(code: str, *args, stdout=subprocess.PIPE, **env):
    code = f"from configurator import run, UserError\ndef main(argv):\n    {code}\nrun(main)"
    return subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, env=os.environ | env,
                          stdout=stdout, stderr=subprocess.PIPE, check=False)


def test_a_stdout_of_another_encoding_or_none_is_no_traceback():
    """https://github.com/Akegarasu/lora-scripts/issues/344"""
    for encoding in ("cp1252", "ascii"):
        r = script("print('out/日本é'); raise UserError('日本')", PYTHONIOENCODING=encoding)
        assert r.returncode == 1 and b"Traceback" not in r.stderr and r.stdout.startswith(b"out/??")
        assert r.stderr.startswith(b"error: ") and r.stderr.count(b"\n") == 1
    code = b"import configurator; configurator.run(lambda _: print(1), [])"
    closed = ["sh", "-c", f"exec {sys.executable} - >&- 2>&-"]
    assert subprocess.run(closed, check=False, cwd=ROOT, input=code).returncode == 0
    read, write = os.pipe()
    os.close(read)
    r = script("print('x')", stdout=write)
    assert (r.returncode, r.stderr) == (1, b"")
    if Path("/dev/full").exists():
        with open("/dev/full", "w") as full:
            r = script("print('x' * 100000)", stdout=full)
        assert (r.returncode, r.stderr) == (
            1, b"error: stdout: cannot be written (No space left on device)\n")


def test_json_to_stdout_is_alone_there(monkeypatch):
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)

    @dataclasses.dataclass
    class Settings:
        json: str | None = None
        seed: int = 0

    def measure(c):
        assert c == Settings("-", 1)
        print("step by step")
        write_json("-", {"a": "日本"})

    for dash in ([], ["-"]):
        run(lambda argv: run_command("", {measure: Settings()}, argv, ""),
            ["measure", "--json", *dash, "--seed=1"])
        assert json.loads(out.getvalue()) == {"a": "日本"} and err.getvalue() == "step by step\n"
        for stream in (out, err):
            stream.seek(0)
            stream.truncate()
    run(lambda argv: write_json("-", {}), [])
    assert out.getvalue() == "{}\n" and session.answers is None


def test_a_later_file_s_system_has_its_own_schedule(tmp_path):
    """As one that the command line names has, where it has one: others keep the file's."""
    first, second, third = (str(tmp_path / f"{name}.py") for name in "abc")
    Path(first).write_text("kv = 'vanilla'\nn_groups = 4\nseed = 5\n")
    Path(second).write_text("kv = 'lckv'\n")
    Path(third).write_text("kv = 'lckv'\nn_groups = 3\n")
    for argv, n in (([first], 4), ([first, "--kv=lckv"], None), ([first, second], None),
                    ([first, "--kv=feedback"], 4), ([third, "--kv=vanilla"], None),
                    ([first, third], 3), ([third, second], 3), ([first, second, first], 4)):
        c = parse(TrainConfig(), argv, "")
        assert (c.n_groups, c.seed) == (n, 1337 if first not in argv else 5)


def test_a_path_that_may_not_be_looked_at_is_one_line(capsys):
    for error in (PermissionError(errno.EACCES, "Permission denied", "/closed/x"),
                  OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300)):
        def main(argv, error=error):
            raise error

        with pytest.raises(SystemExit) as end:
            run(main, [])
        assert end.value.code == 1
        assert capsys.readouterr().err == f"error: {error.filename}: {error.strerror}\n"


def test_threads_do_not_spin_for_long_unless_the_user_says_so():
    """On a machine with other busy processes threads that spin cost a hundredfold."""
    code = "import configurator, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    theirs = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
    without = {k: v for k, v in os.environ.items() if k not in theirs}
    for mine, value in (({}, "1000"), ({"GOMP_SPINCOUNT": "5"}, "5"),
                        ({"OMP_WAIT_POLICY": "active"}, "None")):
        said = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True,
                                       env=without | mine)
        assert said.strip() == value
    for name in ("train", "sample", "evaluate", "bench", "pictures"):
        lines = [line.split()[1] for line in (ROOT / f"{name}.py").read_text().splitlines()
                 if line.startswith(("import ", "from "))]
        assert all(module.partition(".")[0] in sys.stdlib_module_names | {"__future__"}
                   for module in lines[:lines.index("configurator")]), name


@pytest.mark.parametrize("script", ["train.py", "sample.py", "prepare_data.py"])
def test_help_and_a_misspelt_setting_need_no_torch(tmp_path, script):
    """Whose import takes seconds."""
    (tmp_path / "torch.py").write_text("raise ImportError('not needed')\n")
    for argv, status in ((["--help"], 0), (["--ouut_dir=x"], 1)):
        result = subprocess.run([sys.executable, str(ROOT / script), *argv], check=False,
                                capture_output=True, text=True, timeout=60, cwd=tmp_path,
                                env={**os.environ, "PYTHONPATH": str(tmp_path)})
        assert result.returncode == status, result.stderr
        said = "did you mean out_dir" if status else "--out_dir="
        assert said in result.stdout + result.stderr


def test_no_folder_is_called_tilde(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for setting in ("--out_dir=~/x", "--shard_dir=~/x"):
        refused(["fineweb-edu", setting], capsys, setting[2:], f"write {Path.home()}/x",
                main=prepare_data.main)
    assert not list(tmp_path.iterdir())
