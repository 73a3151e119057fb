"""Wheels are downloaded with pip and unpacked without what no run needs."""

from __future__ import annotations

import pytest

from benchmarks.gpu.kit.wheels import DownloadError, download, unpack_wheels
from tests.gpu_kit.made_wheels import wheel


@pytest.fixture
def offline(monkeypatch):
    """Make pip reach no package index."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


def test_wheels_in_the_folder_are_not_downloaded(tmp_path, offline):
    one = wheel(tmp_path, "one_and_more", "1.0", {})
    wheel(tmp_path, "one_and_more", "1.0.1", {})
    two = wheel(tmp_path, "Two", "2.0", {})
    assert download(["two==2.0", "one-and.more==1.0"], tmp_path) == [two, one]


def test_missing_wheel_is_named_with_the_remedy(tmp_path, offline):
    wheel(tmp_path, "one", "1.0", {})
    with pytest.raises(DownloadError) as error:
        download(["one==1.0", "no-such-wheel==1.0"], tmp_path)
    text = str(error.value)
    assert text.startswith("pip cannot download a wheel of no-such-wheel==1.0 for Python 3.12")
    assert "one==1.0" not in text.replace("no-such-wheel==1.0", "")
    assert str(tmp_path) in text


def test_available_wheel_is_downloaded(tmp_path, offline, monkeypatch):
    metadata = {
        "METADATA": "Metadata-Version: 2.1\nName: one\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    files = {f"one-1.0.dist-info/{name}": text for name, text in metadata.items()}
    source = wheel(tmp_path / "index", "one", "1.0", files)
    monkeypatch.setenv("PIP_FIND_LINKS", str(source.parent))
    assert download(["one==1.0"], tmp_path / "wheels") == [tmp_path / "wheels" / source.name]


def test_unpacked_wheels_have_what_a_run_needs(tmp_path):
    library = "l" * 5000
    one = wheel(
        tmp_path,
        "one",
        "1.0",
        {
            "one/__init__.py": "",
            "one/tests/test_one.py": "",
            "one/include/one.h": "",
            "one/fast.cpython-312-x86_64-linux-gnu.so": "fast",
            "one/fast.cpython-311-x86_64-linux-gnu.so": "old",
            "one/lib/libone.so": library,
            "one/lib/libone.so.1": library,
            "one/other/libone.so.1": library,
            "one-1.0.data/purelib/moved/__init__.py": "moved",
        },
    )
    two = wheel(tmp_path, "two", "1.0", {"two.py": "2"})
    unpack_wheels([one, two], tmp_path / "out")
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*")}
    assert found == {
        "one/__init__.py",
        "one/fast.cpython-312-x86_64-linux-gnu.so",
        "one/lib/libone.so",
        "one/lib/libone.so.1",
        "one/other/libone.so.1",
        "moved/__init__.py",
        "two.py",
    }
    lib = tmp_path / "out" / "one" / "lib"
    assert str((lib / "libone.so.1").readlink()) == "libone.so"
    assert (lib / "libone.so.1").read_text() == library
    assert not (tmp_path / "out" / "one" / "other" / "libone.so.1").is_symlink()
