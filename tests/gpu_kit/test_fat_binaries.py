"""Pruning zeroes the GPU code of other architectures in a shared library, and nothing else."""

from __future__ import annotations

import struct

import pytest

from benchmarks.gpu.kit.fat_binaries import FatBinaryError, Pruned, prune

PTX, CUBIN = 1, 2
#: Bytes of a section that has no GPU code, and looks as if it had.
OTHER = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 8) + b"not code"


def entry(kind, architecture, code, header_nbytes=64):
    head = struct.pack("<HHIQ", kind, 1, header_nbytes, len(code)).ljust(0x1C, b"h")
    return (head + struct.pack("<I", architecture)).ljust(header_nbytes, b"h") + code


def container(*entries, nbytes=None):
    body = b"".join(entries)
    size = len(body) if nbytes is None else nbytes
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, size) + body


def elf(gpu_code, name=b".nv_fatbin"):
    """A 64-bit ELF file with a section of GPU code, and another section."""
    names = b"\0" + name + b"\0.data\0.shstrtab\0"
    offsets = [names.index(one) for one in (name + b"\0", b".data\0", b".shstrtab\0")]
    body, headers = b"", [bytes(64)]
    for offset, content in zip(offsets, (gpu_code, OTHER, names), strict=True):
        start = 64 + len(body)
        headers.append(struct.pack("<IIQQQQIIQQ", offset, 1, 0, 0, start, len(content), 0, 0, 8, 0))
        body += content
    head = b"\x7fELF\x02\x01\x01".ljust(0x28, b"\0") + struct.pack("<Q", 64 + len(body))
    head = head.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, len(headers), 3)
    return head + body + b"".join(headers)


@pytest.fixture
def library(tmp_path):
    def made(*containers, **options):
        path = tmp_path / "library.so"
        path.write_bytes(elf(b"".join(containers), **options))
        return path

    return made


def test_only_code_of_other_architectures_becomes_zeros(library):
    path = library(
        container(entry(CUBIN, 80, b"old" * 50), entry(CUBIN, 90, b"new" * 40, 80)),
        bytes(24),  # between containers
        container(
            entry(CUBIN, 90, b"now" * 7), entry(PTX, 90, b"text" * 5), entry(CUBIN, 100, b"x")
        ),
    )
    expected = path.read_bytes()
    for code in (b"old" * 50, b"text" * 5):
        expected = expected.replace(code, bytes(len(code)))
    position = expected.index(struct.pack("<I", 100), expected.index(b"now"))
    position = expected.index(b"x", position)
    expected = expected[:position] + b"\0" + expected[position + 1 :]
    assert prune(path, 90) == Pruned(120 + 21, 150 + 20 + 1)
    assert path.read_bytes() == expected


def test_container_without_the_architecture_stays_whole(library):
    only_text = container(entry(PTX, 80, b"text"), entry(CUBIN, 75, b"code"))
    path = library(only_text, container(entry(CUBIN, 90, b"new"), entry(CUBIN, 75, b"gone")))
    prune(path, 90)
    content = path.read_bytes()
    assert only_text in content
    assert b"gone" not in content


def test_pruning_again_changes_nothing(library):
    path = library(container(entry(CUBIN, 80, b"old"), entry(CUBIN, 90, b"new")))
    prune(path, 90)
    once = path.read_bytes()
    prune(path, 90)
    assert path.read_bytes() == once


def test_missing_architecture_is_refused_with_those_there_are(library):
    path = library(container(entry(CUBIN, 80, b"old"), entry(CUBIN, 90, b"new")))
    before = path.read_bytes()
    with pytest.raises(FatBinaryError, match=r"architecture 91; it has: 80, 90$"):
        prune(path, 91)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content, message",
    [
        (b"MZ" + bytes(100), "not a 64-bit ELF"),
        (elf(container(entry(CUBIN, 90, b"x")), name=b".text_here"), "no GPU code"),
        (elf(b""), "no GPU code"),
        (elf(container(entry(CUBIN, 90, b"x"), nbytes=1 << 40)), "exceeds its section"),
        (elf(container(entry(CUBIN, 90, b"x" * 9), nbytes=70)), "exceeds its container"),
        (elf(container(entry(CUBIN, 90, b"x" * 9)))[:90], "damaged"),
        (elf(container(bytes(64))), "exceeds its container"),
    ],
    ids=["no ELF", "no section", "empty", "container", "entry", "cut off", "zeros"],
)
def test_damaged_library_is_refused_and_unchanged(tmp_path, content, message):
    path = tmp_path / "library.so"
    path.write_bytes(content)
    with pytest.raises(FatBinaryError, match=rf"library\.so: .*{message}"):
        prune(path, 90)
    assert path.read_bytes() == content
