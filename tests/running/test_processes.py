"""Several processes: how they find each other, agree, and end."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import ROOT, arguments, refused

from configurator import UserError, ranks, run
from running.processes import Processes
from running.settings import TrainConfig, check


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc here")
def test_a_group_of_which_one_is_missing_ends_by_a_signal_and_joins_its_threads():
    """A thread of gloo that is alive while Python shuts down may abort the process; a worker that
    waits for another one ignored SIGTERM."""
    code = """if True:
        import glob, os, signal, time, torch
        from configurator import ranks
        from running.processes import Processes
        from running.signals import Signals
        waits = os.fork()
        if not waits:
            signals = Signals()
            print("there", flush=True)
            Processes(*ranks()).start("cpu")
            os._exit(0)
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}
        def threads():
            names = [open(name).read().strip() for name in glob.glob("/proc/self/task/*/comm")]
            return names.count("pt_gloo_runloop")
        try:
            processes = Processes(rank=0, world=2)
            processes.start("cpu")
            assert processes.largest(7) == 7
            assert threads()
            time.sleep(1)  # while the other one waits
            processes.end()
            assert not threads()
        finally:
            os.kill(waits, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(waits, 0)[1]))
        """
    env = os.environ | dict(RANK="1", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="29999",
                            TORCH_CPP_LOG_LEVEL="FATAL")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, text=True, check=False,
                          capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["there", str(128 + signal.SIGTERM)]
    assert done.stderr.splitlines()[-1].startswith("SIGTERM before the first step")


@pytest.mark.parametrize("env, words", [
    (dict(WORLD_SIZE="2"), ["WORLD_SIZE=2, no RANK", "torchrun"]),
    (dict(RANK="3", WORLD_SIZE="2", LOCAL_RANK="0"), ["RANK=3", "WORLD_SIZE=2"]),
    (dict(WORLD_SIZE="two"), ["whole numbers", "two"])])
def test_half_an_environment_of_torchrun_is_named(folder, monkeypatch, capsys, env, words):
    """https://github.com/meta-llama/llama-cookbook/issues/59"""
    monkeypatch.chdir(folder)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as error:
        Processes(*ranks())
    assert all(word in str(error.value) for word in words)
    if "RANK" not in env:
        refused(arguments(), capsys, *words)


def test_a_port_in_use_is_one_line(monkeypatch):
    """https://github.com/mguti97/PnLCalib/issues/6"""
    with socket.socket() as s:
        s.bind(("", 0))
        s.listen()
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"),
                            ("MASTER_PORT", str(s.getsockname()[1]))):
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match="2 processes do not meet at localhost.*EADDRINUSE"):
            Processes(0, 2).start("cpu")


def test_a_process_that_has_ended_is_named(monkeypatch):
    def lost(*_):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:525] Connection closed by peer\nmore")

    monkeypatch.setattr(torch.distributed, "all_reduce", lost)
    with pytest.raises(UserError, match=re.compile("another process has ended .*peer.$")):
        Processes(0, 2).sum(torch.ones(1))


def test_accumulation_must_divide():
    with pytest.raises(UserError, match="3.*2"):
        check(TrainConfig(gradient_accumulation_steps=3), 0, 2)


@pytest.mark.parametrize("rank, local, together, said", [
    ("0", "0", False, "error: x"), ("1", "1", False, ""), ("8", "0", False, "error (rank 8): x"),
    ("1", "1", True, "error (rank 1): x")])
def test_who_of_several_processes_says_what_is_wrong(monkeypatch, capsys, rank, local, together,
                                                     said):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: together)

    def main(_):
        raise UserError("x")

    with pytest.raises(SystemExit):
        run(main, [])
    assert capsys.readouterr().err.strip() == said


def test_documented_commands_do_not_need_a_port():
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        assert "torchrun " not in line or "--standalone" in line or "--rdzv" in line
