"""What stands in for a sync refuses what a sync refuses."""

from __future__ import annotations

import errno
import os

import pytest

from tests.kit.disk import fsync_of_the_cache, real_fsync


@pytest.mark.parametrize("fsync", [real_fsync, fsync_of_the_cache])
def test_a_file_that_was_closed_is_refused_and_an_open_one_is_not(fsync, tmp_path):
    file = os.open(tmp_path, os.O_RDONLY)
    assert fsync(file) is None
    os.close(file)
    with pytest.raises(OSError) as refused:
        fsync(file)
    assert refused.value.errno == errno.EBADF
