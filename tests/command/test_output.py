"""A command whose output cannot be written says so in one line."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from dask_gpurt.tracing import files
from dask_gpurt.tracing.events import Trace


def run(*arguments, **options):
    options.setdefault("stdout", subprocess.PIPE)
    return subprocess.run(
        [sys.executable, "-m", "dask", "gpurt", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        **options,
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_to_a_full_disk(unbuffered):
    with open("/dev/full", "w") as full:
        done = run("doctor", stdout=full, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    assert done.stderr == "dask gpurt: the output cannot be written: No space left on device\n"
    assert done.returncode == 2


def test_output_with_a_character_that_its_encoding_lacks(tmp_path):
    trace, page = tmp_path / "trace.json", tmp_path / "gr\u00f6\u00dfe.html"
    files.write(Trace([]), trace)
    done = run("report", trace, "--html", page, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.stderr == (
        "dask gpurt: the output has '\\xf6\\xdf', which ascii cannot express; "
        "set PYTHONIOENCODING=utf-8\n"
    )
    assert done.returncode == 2
    assert page.exists()


def test_output_that_is_closed_is_no_error():
    command = f"{shlex.quote(sys.executable)} -m dask gpurt topology --help >&-"
    done = subprocess.run(
        ["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
