"""What every test needs: runs that are started here stand in no registry of the user's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A state folder and a folder of device locks for this session and all that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("OPD_LEASES", str(tmp_path_factory.mktemp("leases")))
        yield
