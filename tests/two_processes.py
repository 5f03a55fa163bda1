"""A hook of pytest: on a machine without a GPU, two processes share the tests."""

import contextlib
import json
import os
import signal
import sys
import tempfile
import traceback

import numpy as np
import torch

PIECES = 128  # of the tests, at most 255


def pytest_runtestloop(session):
    """Two processes share many tests: each takes the next piece of the list when it has none left.

    Nothing is forked beside a GPU, and one process runs them where an option asks for an order.
    """
    config, items = session.config, session.items
    option = config.option
    if (len(items) < PIECES or torch.cuda.is_available() or not hasattr(os, "sched_getaffinity")
            or len(os.sched_getaffinity(0)) < 2 or session.testsfailed or option.collectonly
            or option.maxfail or option.usepdb or config.pluginmanager.hasplugin("xdist")):
        return None
    pieces = [list(piece) for piece in np.array_split(np.array(items, dtype=object), PIECES)]
    left, numbers = os.pipe()
    os.write(numbers, bytes(range(PIECES)))
    os.close(numbers)

    def run():
        numbers = iter(lambda: os.read(left, 1), b"")
        mine = (item for number in numbers for item in pieces[number[0]])
        item = next(mine, None)
        while item is not None:
            following = next(mine, None)
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following

    with tempfile.TemporaryFile("w+") as reports:
        child = os.fork()
        if child == 0:
            with ends_here():
                report_to(reports, config)
                run()
        try:
            run()
        except BaseException:
            os.kill(child, signal.SIGTERM)
            raise
        if os.waitpid(child, 0)[1] != 0:
            raise RuntimeError("the second process of the tests has not come to its end")
        reports.seek(0)
        for line in reports:
            config.hook.pytest_runtest_logreport(report=restored(config, line))
    return True


def restored(config, line):
    """A report from its line of JSON."""
    report = config.hook.pytest_report_from_serializable(config=config, data=json.loads(line))
    if isinstance(report.longrepr, list):  # why a test was skipped; JSON knows no tuples
        report.longrepr = tuple(report.longrepr)
    return report


@contextlib.contextmanager
def ends_here():
    """The process ends with the block: with status 0 if nothing was raised."""
    status = 1
    try:
        yield
        status = 0
    except Exception:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(status)


def report_to(file, config):
    """Results go to a file, in place of the terminal, and output to files of this process."""
    class Reports:
        def pytest_runtest_logreport(self, report):
            data = config.hook.pytest_report_to_serializable(config=config, report=report)
            print(json.dumps(data), file=file, flush=True)

    plugins = config.pluginmanager
    plugins.unregister(name="terminalreporter")
    plugins.register(Reports())
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
