"""A worker spills to another directory if it cannot use the configured one."""

from __future__ import annotations

import errno
import logging
import os
import tempfile

import pytest
from distributed.utils_test import gen_cluster

from dask_gpurt.memory.files.inherited import InheritedTier
from dask_gpurt.plugins.memory.store_levels import parent_directory


def test_directory_that_was_set_is_made(tmp_path):
    wanted = tmp_path / "a" / "b"
    assert parent_directory(str(wanted), str(tmp_path)) == str(wanted)
    assert wanted.is_dir()


def test_without_a_setting_it_is_the_workers_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parent_directory(None, "worker") == str(tmp_path / "worker")


@pytest.mark.parametrize("unusable", ["/proc/nowhere", "a file", "read-only"])
def test_unusable_directory_is_named_and_passed_by(unusable, tmp_path, monkeypatch, caplog):
    wanted = unusable if unusable.startswith("/") else str(tmp_path / unusable)
    if unusable == "a file":
        (tmp_path / unusable).write_text("")
    if unusable == "read-only":

        def refuse(**kwargs):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with caplog.at_level(logging.WARNING):
        assert parent_directory(wanted, str(tmp_path)) == str(tmp_path)
    (record,) = caplog.records
    assert f"gpurt.memory.directory is {wanted}, " in record.message
    assert f"spilled under {tmp_path} instead" in record.message


def test_full_disk_is_kept_since_it_may_have_room_later(tmp_path, monkeypatch):
    def refuse(**kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert parent_directory(str(tmp_path / "full"), str(tmp_path)) == str(tmp_path / "full")


@gen_cluster(
    nthreads=[("127.0.0.1", 1)],
    worker_kwargs={"memory_limit": "10 GB"},
    config={"gpurt.enabled": True},
)
async def test_no_value_goes_to_the_tier_that_takes_none(s, a):
    """With a full disk, each value would be pickled for a tier that always refuses it."""
    residency = a.data.residency
    below = {number for chain in residency.chains.values() for number in chain}
    names = [level.name for level in residency.levels]
    assert "disk" in {names[number] for number in below}
    assert names.index(InheritedTier.name) not in below
