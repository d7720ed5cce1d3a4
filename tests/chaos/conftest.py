"""One zygote and one world for all trials of a process."""

import pytest

pytest.register_assert_rewrite("chaos.kills", "chaos.world", "chaos.volumes")

from chaos import world as worlds  # noqa: E402
from chaos.zygote import Zygote  # noqa: E402


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """The compiled shim.c, or None where no gcc is."""
    return worlds.compile_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def need_shim(shim):
    if shim is None:
        pytest.skip("no gcc here: the shim that strikes at the n-th system call cannot be compiled")


@pytest.fixture(scope="session")
def zygote(shim):
    zygote = Zygote(shim)
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def world(zygote, tmp_path_factory):
    return worlds.make(zygote, tmp_path_factory.mktemp("world"))
