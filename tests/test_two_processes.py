"""What the second process of the tests hands over."""

import json

from pytest import TestReport
from two_processes import restored


def test_a_report_of_a_skipped_test_is_as_it_was(pytestconfig):
    """pytest -v and -rs take the reason apart."""
    why = ("test_x.py", 3, "Skipped: no CUDA device")
    report = TestReport("x", ("test_x.py", 2, "x"), {}, "skipped", why, "call")
    line = json.dumps(pytestconfig.hook.pytest_report_to_serializable(config=pytestconfig,
                                                                      report=report))
    assert restored(pytestconfig, line).longrepr == why
