"""Archives of the kit are split, joined and checked; a damaged one says what to do."""

from __future__ import annotations

import os
import random

import pytest

from benchmarks.gpu.kit import making
from benchmarks.gpu.kit.archives import (
    MANIFEST,
    ArchiveError,
    pack,
    read_manifest,
    split,
    unpack,
    write_manifest,
)
from benchmarks.gpu.kit.fat_binaries import Pruned
from benchmarks.gpu.kit.making import make
from tests.gpu_kit.made_wheels import wheel

NOISE = random.Random(3).randbytes(10_000)


@pytest.fixture
def folder(tmp_path):
    source = tmp_path / "source"
    (source / "package").mkdir(parents=True)
    (source / "package" / "library.so.1").write_bytes(NOISE)
    (source / "package" / "library.so").symlink_to("library.so.1")
    (source / "package" / "module.py").write_text("value = 7\n")
    return source


@pytest.fixture
def kit(tmp_path):
    kit = tmp_path / "kit"
    kit.mkdir()
    return kit


def content(folder):
    return {
        str(path.relative_to(folder)): path.readlink() if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.parametrize("part_nbytes, n_parts", [(1 << 20, 1), (4096, 3), (100, 103)])
def test_parts_are_joined_to_the_same_files(folder, kit, part_nbytes, n_parts):
    archive = pack(folder, kit / "one.tar.xz", part_nbytes, "")
    assert len(archive.parts) == pytest.approx(n_parts, abs=2 if n_parts > 100 else 0)
    assert all(part.nbytes <= part_nbytes for part in archive.parts)
    assert archive.unpacked_nbytes == len(NOISE) + len("value = 7\n")
    assert sorted(path.name for path in kit.iterdir()) == sorted(one.file for one in archive.parts)
    assert unpack(kit, archive, kit / "unpacked" / "one")
    assert content(kit / "unpacked" / "one") == content(folder)


def test_equal_folders_give_equal_archives(folder, kit):
    first = pack(folder, kit / "one.tar.xz", 1 << 20, "")
    os.utime(folder / "package" / "module.py", (1, 1))
    assert pack(folder, kit / "one.tar.xz", 1 << 20, "") == first


def test_parts_of_an_earlier_split_are_removed(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(NOISE)
    assert len(split(path, 1000)) == 10
    path.write_bytes(NOISE)
    (part,) = split(path, 10_000)
    assert [one.name for one in tmp_path.iterdir()] == ["data"] == [part.file]


def test_archive_is_unpacked_once_and_again_after_a_cut(folder, kit):
    archive = pack(folder, kit / "one.tar.xz", 4096, "")
    target = kit / "unpacked" / "one"
    assert unpack(kit, archive, target)
    (target / "package" / "module.py").write_text("changed")
    assert not unpack(kit, archive, target)
    (kit / "unpacked" / "one.unpacked").unlink()
    assert unpack(kit, archive, target)
    assert content(target) == content(folder)


def test_another_archive_of_the_name_replaces_the_old_files(folder, kit):
    target = kit / "unpacked" / "one"
    unpack(kit, pack(folder, kit / "one.tar.xz", 4096, ""), target)
    (folder / "package" / "module.py").rename(folder / "package" / "other.py")
    assert unpack(kit, pack(folder, kit / "one.tar.xz", 4096, ""), target)
    assert content(target) == content(folder)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "harm, message",
    [
        (cut, r"one\.tar\.xz\.1 is damaged: it has 4095 bytes .* not 4096 .*Carry it again"),
        (flip, r"one\.tar\.xz\.1 is damaged: .*Carry it again"),
        (lambda path: path.unlink(), r"one\.tar\.xz\.1 is missing.*carry this file again"),
    ],
    ids=["cut", "flipped", "missing"],
)
def test_damaged_part_is_named_and_nothing_unpacked(folder, kit, harm, message):
    archive = pack(folder, kit / "one.tar.xz", 4096, "")
    harm(kit / "one.tar.xz.1")
    with pytest.raises(ArchiveError, match=message):
        unpack(kit, archive, kit / "unpacked" / "one")
    assert not (kit / "unpacked").exists()


def test_manifest_is_read_as_it_was_written(folder, kit):
    archives = {"one": pack(folder, kit / "one.tar.xz", 4096, "one==1")}
    write_manifest(kit, archives)
    assert read_manifest(kit) == archives


@pytest.mark.parametrize("text", ["", "[]", '{"one": 1}', '{"one": {"parts": []}}', "{"])
def test_damaged_manifest_says_what_to_do(kit, text):
    (kit / MANIFEST).write_text(text)
    with pytest.raises(ArchiveError, match=r"is damaged.*Carry it again"):
        read_manifest(kit)


def test_missing_manifest_says_what_to_do(kit):
    with pytest.raises(ArchiveError, match="carry it with every call"):
        read_manifest(kit)


# ------------------------------------------------------------------ making the archives


def made(kit, packages, lines, part_nbytes=1 << 20):
    return make(kit, packages, None, part_nbytes, lines.append)


def test_archives_that_are_there_are_not_made_again(kit):
    wheel(kit / "wheels", "one", "1.0", {"one.py": "x = 1"})
    wheel(kit / "wheels", "two", "2.0", {"two.py": "x = 2"})
    packages, lines = {"a": ("one==1.0",), "b": ("two==2.0",)}, []
    archives = made(kit, packages, lines)
    assert [line.split(":")[0] for line in lines] == ["a", "b"]
    assert read_manifest(kit) == archives
    flip(kit / "b.tar.xz")
    lines.clear()
    assert made(kit, packages, lines) == archives
    assert [line.split(":")[0] for line in lines] == ["b"]


def test_other_packages_or_smaller_parts_make_an_archive_again(kit):
    wheel(kit / "wheels", "one", "1.0", {"one.py": "x = 1"})
    wheel(kit / "wheels", "one", "2.0", {"one.py": "x = 2"})
    lines = []
    first = made(kit, {"a": ("one==1.0",)}, lines)["a"]
    second = made(kit, {"a": ("one==2.0",)}, lines)["a"]
    assert first.sha256 != second.sha256
    assert made(kit, {"a": ("one==2.0",)}, lines, 2 << 20)["a"] == second
    assert len(lines) == 2
    (part,) = second.parts
    assert len(made(kit, {"a": ("one==2.0",)}, lines, part.nbytes - 1)["a"].parts) == 2


def test_pruned_library_is_in_the_archive(kit, monkeypatch):
    monkeypatch.setattr(making, "PRUNED", ("a", "one/library.so"))
    pruned = []

    def prune(path, architecture):
        pruned.append((path.read_text(), architecture))
        path.write_text("pruned")
        return Pruned(1, 2)

    monkeypatch.setattr(making, "prune", prune)
    wheel(kit / "wheels", "one", "1.0", {"one/library.so": "whole"})
    archive = make(kit, {"a": ("one==1.0",)}, 90, 1 << 20, lambda text: None)["a"]
    assert pruned == [("whole", 90)]
    unpack(kit, archive, kit / "unpacked" / "a")
    assert (kit / "unpacked" / "a" / "one" / "library.so").read_text() == "pruned"
    whole = make(kit, {"a": ("one==1.0",)}, None, 1 << 20, lambda text: None)["a"]
    assert whole.recipe != archive.recipe
