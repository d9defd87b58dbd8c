"""What several modules of this folder share."""

import pytest
import tiny

from nanoqwen.pack import pack


@pytest.fixture(scope="session")
def packed(tmp_path_factory):
    """Path of the plain fixture, packed: context 8192."""
    root = tmp_path_factory.mktemp("plain")
    pack(tiny.make(root / "S"), root / "S.nanoqwen")
    return root / "S.nanoqwen"
