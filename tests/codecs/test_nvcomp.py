"""The codecs of nvCOMP work with an emulated library; `tests/gpu` tests the real one."""

from __future__ import annotations

import contextlib
import struct
import sys
import threading

import numpy as np
import pyarrow as pa
import pytest

from dask_gpurt.codecs import nvcomp
from dask_gpurt.codecs.cpu import HOST_CODECS, opened, sealed
from dask_gpurt.codecs.nvcomp import NVCOMP_CODECS
from dask_gpurt.errors import ProtocolError
from tests.conformance.codec_suite import CodecSuite

_NBYTES = struct.Struct("<Q")


class Array:
    """An array that knows whether it is on the device."""

    def __init__(self, data, is_on_device=False):
        self.data = np.array(data)
        self.is_on_device = is_on_device

    def cuda(self):
        return Array(self.data, True)

    def cpu(self):
        return self.data


class Codec:
    """The calls of nvCOMP's codec that we use."""

    n_made = 0

    def __init__(self, *, algorithm, uncomp_chunk_size):
        Codec.n_made += 1
        self._name = {"LZ4": "lz4_raw", "Zstd": "zstd"}[algorithm]
        self._thread = threading.get_ident()

    def _checked(self, array):
        assert array.is_on_device
        assert self._thread == threading.get_ident()
        return array.data

    def encode(self, array):
        raw = self._checked(array)
        body = pa.Codec(self._name).compress(pa.py_buffer(raw))
        data = np.frombuffer(_NBYTES.pack(raw.nbytes) + bytes(body), np.uint8)
        return Array(data, True)

    def get_uncomp_buffer_size(self, array):
        data = self._checked(array)
        if data.nbytes < _NBYTES.size:
            raise RuntimeError("no header")
        return _NBYTES.unpack(data[: _NBYTES.size].tobytes())[0]

    def decode(self, array):
        nbytes = self.get_uncomp_buffer_size(array)
        body = pa.py_buffer(array.data[_NBYTES.size :])
        try:
            raw = pa.Codec(self._name).decompress(body, decompressed_size=nbytes)
        except OSError as error:
            raise RuntimeError("damaged") from error
        return Array(np.frombuffer(raw, np.int8), True)


class Library:
    Codec = Codec

    @staticmethod
    def as_array(array):
        assert array.flags.writeable
        return Array(array)


@contextlib.contextmanager
def emulated(monkeypatch):
    """Make this process use a device and have nvCOMP."""
    monkeypatch.setattr(nvcomp, "_library", Library)
    monkeypatch.setattr(nvcomp, "_of_thread", threading.local())
    monkeypatch.setitem(sys.modules, "cupy", sys.modules.get("cupy"))
    nvcomp._usable.cache_clear()
    yield
    nvcomp._usable.cache_clear()


@pytest.fixture(autouse=True)
def library(monkeypatch):
    with emulated(monkeypatch):
        yield


class TestLz4(CodecSuite):
    codec = NVCOMP_CODECS[128]
    compressible = ("constant", "small range", "text")


class TestZstd(CodecSuite):
    codec = NVCOMP_CODECS[129]
    compressible = ("constant", "small range", "text", "days")


def test_device_codec_numbers_differ_from_host_codec_numbers():
    assert not NVCOMP_CODECS.keys() & HOST_CODECS.keys()
    assert min(NVCOMP_CODECS) >= 128


def test_each_thread_makes_one_coder():
    raw = np.zeros(1000, np.uint8)
    before = Codec.n_made

    def encode():
        for _ in range(3):
            assert NVCOMP_CODECS[128].encode(raw, 1) is not None

    encode()
    thread = threading.Thread(target=encode)
    thread.start()
    thread.join()
    assert Codec.n_made == before + 2


def test_a_process_without_a_device_creates_no_context(monkeypatch):
    assert nvcomp.usable() == NVCOMP_CODECS
    for name in ("cudf", "cupy", "rmm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert nvcomp.usable() == {}


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError])
def test_without_nvcomp_or_a_device_no_codec_is_usable(monkeypatch, error):
    payload = np.concatenate(NVCOMP_CODECS[128].encode(np.zeros(1000, np.uint8), 1))

    def missing():
        raise error

    monkeypatch.setattr(nvcomp, "_library", missing)
    nvcomp._usable.cache_clear()
    assert nvcomp.usable() == {}
    with pytest.raises(ProtocolError, match="has no nvcomp lz4"):
        NVCOMP_CODECS[128].decode_into(payload, np.empty(1000, np.uint8), 1)


def test_a_full_device_leaves_bytes_raw(monkeypatch):
    def full(self, array):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Codec, "encode", full)
    assert NVCOMP_CODECS[128].encode(np.zeros(1000, np.uint8), 1) is None


def test_a_wrong_length_is_refused_before_allocation(monkeypatch):
    codec = NVCOMP_CODECS[128]
    raw = np.zeros(1000, np.uint8)
    body = opened(128, "", np.concatenate(codec.encode(raw, 1)), 1000, 1).copy()
    body[: _NBYTES.size] = np.frombuffer(_NBYTES.pack(1 << 60), np.uint8)
    payload = np.concatenate(sealed(128, 1000, 1, [body]))

    def never(self, array):
        raise AssertionError("decoded what was to be refused")

    monkeypatch.setattr(Codec, "decode", never)
    with pytest.raises(ProtocolError, match="where 1000 were announced"):
        codec.decode_into(payload, np.empty(1000, np.uint8), 1)


def full(array):
    raise MemoryError("out of memory")


def test_bytes_go_raw_while_the_device_is_full(monkeypatch):
    monkeypatch.setattr(nvcomp, "_on_device", full)
    assert NVCOMP_CODECS[128].encode(np.zeros(1000, np.uint8), 1) is None


def test_bytes_that_a_full_device_cannot_decode_are_not_damaged(monkeypatch):
    assert nvcomp.usable()  # so this process has offered its codecs
    payload = np.concatenate(NVCOMP_CODECS[128].encode(np.zeros(1000, np.uint8), 1))
    monkeypatch.setattr(nvcomp, "_on_device", full)
    with pytest.raises(MemoryError, match="no room on the device to decode 1000 bytes"):
        NVCOMP_CODECS[128].decode_into(payload, np.empty(1000, np.uint8), 1)


def test_codecs_are_usable_again_once_a_full_device_has_room(monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(nvcomp, "_on_device", full)
        nvcomp._usable.cache_clear()
        assert nvcomp.usable() == {}
    assert nvcomp.usable() == NVCOMP_CODECS
