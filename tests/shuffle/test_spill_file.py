"""A spill file lets go of its descriptor once, whatever the system reports."""

from __future__ import annotations

import errno
import os

from dask_gpurt.shuffle.spill_file import SpillFile


def test_file_whose_close_reports_an_error_is_closed_once(tmp_path, monkeypatch, caplog):
    """A network file system may report at the close that the disk is full."""
    file = SpillFile(str(tmp_path / "file"))
    closed, close = [], os.close

    def report(fd):
        closed.append(fd)
        close(fd)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", report)
        file.remove()
        file.remove()
    assert len(closed) == 1
    assert os.strerror(errno.EDQUOT) in caplog.text
