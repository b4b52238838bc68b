"""What the checks of calls themselves leave behind: nothing."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

from skuda.tools.verify import calls
from skuda.tools.verify.compare import Spoiled


def test_what_other_threads_print_is_passed_on(capsys):
    def progress():
        print("half way")  # noqa: T201
        sys.stderr.flush()

    with calls.silence():
        thread = threading.Thread(target=progress)
        thread.start()
        thread.join()
    assert capsys.readouterr().out == "half way\n"


def test_standard_output_is_as_before_after_a_print_and_after_an_error(capfd):
    before = sys.stdout, sys.stderr
    with pytest.raises(Spoiled), calls.silence():
        print("loud")  # noqa: T201
    with pytest.raises(ZeroDivisionError), calls.silence():
        raise ZeroDivisionError
    assert (sys.stdout, sys.stderr) == before
    print("heard")  # noqa: T201
    assert capfd.readouterr().out == "heard\n"


def test_an_error_is_not_hidden_by_a_changed_state():
    before = np.geterr()

    def fail():
        np.seterr(all="raise")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), calls.unchanged_state():
        fail()
    assert np.geterr() == before


def test_arrays_of_torch_and_cupy_are_read_through_their_own_way():
    class OnDevice:
        def get(self):
            return np.arange(3)

    np.testing.assert_array_equal(calls._on_host(OnDevice()), np.arange(3))
