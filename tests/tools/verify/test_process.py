"""What the checks of calls themselves leave behind: nothing."""

from __future__ import annotations

import sys
import threading
import warnings

import numpy as np
import pytest

from skuda.tools.verify.compare import Broken
from skuda.tools.verify.process import silence, unchanged_state


def test_what_other_threads_print_and_warn_of_is_passed_on(capsys):
    def progress():
        print("half way")  # noqa: T201
        warnings.warn("another thread", stacklevel=1)
        sys.stderr.flush()

    with silence():
        thread = threading.Thread(target=progress)
        thread.start()
        thread.join()
    assert capsys.readouterr().out == "half way\n"


def test_streams_and_filters_are_restored_after_noise_and_errors(capfd):
    before = sys.stdout, sys.stderr, warnings.showwarning, list(warnings.filters)
    with pytest.raises(Broken, match="a call prints 'loud"), silence():
        print("loud")  # noqa: T201
    with pytest.raises(Broken, match="a call warns: slow"), silence():
        warnings.warn("slow", stacklevel=1)
    with pytest.raises(ZeroDivisionError), silence():
        raise ZeroDivisionError
    assert (sys.stdout, sys.stderr, warnings.showwarning, list(warnings.filters)) == before
    print("heard")  # noqa: T201
    assert capfd.readouterr().out == "heard\n"


def test_an_error_is_not_hidden_by_a_changed_state():
    before = np.geterr()

    def fail():
        np.seterr(all="raise")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), unchanged_state():
        fail()
    assert np.geterr() == before


def test_a_changed_folder_is_found(monkeypatch, tmp_path):
    with pytest.raises(Broken, match="changes the folder"), unchanged_state():
        monkeypatch.chdir(tmp_path)
