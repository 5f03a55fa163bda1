"""What a signal means, whichever it is and whenever it comes."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="POSIX signals")


def as_in_a_terminal():
    """These tests may run under nohup or behind, where signals are ignored from the start."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def process(code: str, before=as_in_a_terminal):
    """A process that listens, runs the code and says when it is there."""
    head = "import os, time, signal\nfrom running import signals\ns = signals.Signals()\n"
    p = subprocess.Popen([sys.executable, "-c", head + code], cwd=ROOT, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True, preexec_fn=before)  # noqa: PLW1509
    assert p.stdout.readline() == "there\n"
    return p


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"])
def test_before_the_first_step_a_signal_ends_at_once_with_one_line(name):
    p = process("print('there', flush=True); time.sleep(60)")
    p.send_signal(getattr(signal, name))
    _, error = p.communicate(timeout=10)
    assert p.returncode == 128 + getattr(signal, name)
    assert error == f"{name} before the first step: there was nothing to save\n"


def test_even_while_the_main_thread_waits_where_no_handler_runs():
    """As in a rendezvous, where a worker waited for SIGKILL."""
    p = process("import ctypes, threading\n"
                "lock = ctypes.CDLL(None).sem_wait; sem = ctypes.create_string_buffer(64)\n"
                "print('there', flush=True)\n"
                "while True: lock(sem)  # goes on waiting after a signal, and lets go of the GIL\n")
    p.send_signal(signal.SIGTERM)
    assert p.wait(timeout=10) == 128 + signal.SIGTERM


def test_a_repeat_is_the_same_request_and_a_later_ctrl_c_ends_at_once():
    """https://github.com/pytorch/pytorch/issues/115219: the same signal comes twice."""
    code = ("signals.SAME = 0.5\ns.begun = True\nprint('there', flush=True)\n"
            "while True:\n    time.sleep(0.02)\n"
            "    if s.received: print(s.received, flush=True)\n")
    p = process(code)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT, signal.SIGHUP):
        p.send_signal(number)
        time.sleep(0.05)
    time.sleep(0.5)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # a scheduler that asks again has SIGKILL, too
        p.send_signal(number)
        time.sleep(0.05)
    assert p.poll() is None
    p.send_signal(signal.SIGINT)
    out, error = p.communicate(timeout=10)
    assert p.returncode == 130 and set(out.split()) == {str(int(signal.SIGTERM))}
    assert error == ("Ctrl-C: ends after this step; again: at once\n"
                     "Ctrl-C again: ends without saving; the checkpoint is from before\n")


def test_the_first_ctrl_c_after_another_request_changes_nothing():
    p = process("signals.SAME = 0.1\ns.begun = True\nprint('there', flush=True)\n"
                "while not s.interrupted: time.sleep(0.02)\nprint(s.received)")
    for number in (signal.SIGUSR1, signal.SIGINT):
        p.send_signal(number)
        time.sleep(0.3)
    assert p.communicate(timeout=10) == (
        f"{int(signal.SIGUSR1)}\n", "Ctrl-C: ends after this step; again: at once\n")
    assert p.returncode == 0


def test_what_is_ignored_from_the_start_stays_ignored():
    """nohup: https://github.com/pytorch/pytorch/issues/67538"""
    p = process("print('there', flush=True); time.sleep(0.3); print('alive')",
                lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    p.send_signal(signal.SIGHUP)
    assert p.communicate(timeout=10) == ("alive\n", "") and p.returncode == 0


def test_a_forked_process_is_left_alone():
    """A pool of processes that is told to end would otherwise stop the training."""
    p = process("s.begun = True\npid = os.fork()\nif not pid: time.sleep(60)\n"
                "time.sleep(0.1); os.kill(pid, signal.SIGTERM); _, status = os.waitpid(pid, 0)\n"
                "time.sleep(0.1); print('there', status, s.received)\n".replace(
                    "pid = os.fork()", "print('there', flush=True); pid = os.fork()"))
    out, error = p.communicate(timeout=10)
    assert (out, error) == (f"there {int(signal.SIGTERM)} None\n", "")


def test_what_is_unfinished_goes_with_a_process_that_ends_at_once(tmp_path):
    """As the data set that the first start of all prepares."""
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial/train.bin").write_text("half")
    p = process(f"signals.UNFINISHED.add('{tmp_path}/partial'); print('there', flush=True); "
                "time.sleep(60)")
    p.send_signal(signal.SIGTERM)
    p.communicate(timeout=30)
    assert p.returncode == 128 + signal.SIGTERM and not any(tmp_path.iterdir())
