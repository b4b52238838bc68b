"""`installed` finds what can be imported."""

from __future__ import annotations

import pytest

from skuda.dispatch.system.packages import installed


@pytest.mark.parametrize(
    ("name", "found"),
    {"json.decoder": True, "sys": True, "no_such": False, "no_such.x": False, "json.x": False}.items(),
)
def test_what_can_be_imported_is_installed(name, found):
    assert installed(name) is found
