"""Which side of the harness this process is: the pytest that a person starts, or one rank of several."""

import os

import pytest
from harness import under_launcher

os.environ["HPCDL_TUNING"] = "0"  # else the user's own table would change what is tested

if under_launcher():
    from harness.child import Child as Side
else:
    from harness.parent import Parent as Side
    from harness.ulfm import open_mpi as open_mpi  # a fixture


@pytest.hookimpl(trylast=True)  # pytest's own plugins must be there: a rank silences one of them
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Side(config), "ranks")
