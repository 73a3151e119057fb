"""Files of traces, in two formats that ui.perfetto.dev opens.

The ending of a name decides: `.json` and `.json.gz` are Chrome's format, `.perfetto-trace` and
`.pftrace` are Perfetto's own. Both hold everything that a `Trace` has, except that times become
whole nanoseconds. Files are written and read event by event.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from dask_gpurt.errors import TraceFileError
from dask_gpurt.tracing.events import Trace
from dask_gpurt.tracing.formats import chrome, packet_reader, packet_writer, protobuf

_CHROME, _PERFETTO = (".json", ".json.gz"), (".perfetto-trace", ".pftrace")
#: Endings of the names of traces.
ENDINGS = (*_CHROME, *_PERFETTO)

#: Errors of parsing bytes that `write` did not write.
_DAMAGE = (
    AttributeError,
    EOFError,
    IndexError,
    KeyError,
    OverflowError,
    RecursionError,
    TraceFileError,
    TypeError,
    ValueError,
    gzip.BadGzipFile,
    zlib.error,
)


def check(path: str | os.PathLike[str]) -> None:
    """Find out before a trace begins whether its file can be written.

    Raises
    ------
    TraceFileError
        No file can be written there, the ending is none of `ENDINGS`, or the package for it is
        missing.
    """
    path = Path(path)
    if not path.absolute().parent.is_dir():
        raise TraceFileError(f"cannot write {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise TraceFileError(f"cannot write {path}: it is a folder")
    try:
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise TraceFileError(f"cannot write {path}: {error.strerror or error}") from error
    if _ending(path) in _PERFETTO:
        try:
            protobuf.protos()
        except TraceFileError as error:
            raise TraceFileError(f"cannot write {path}: {error}") from error


def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace to a file. Until the file is complete, it has another name.

    Parameters
    ----------
    trace
        The trace.
    path
        Name of the file. Its ending decides about the format.

    Raises
    ------
    TraceFileError
        The file cannot be written, the ending is none of `ENDINGS`, or the package for it is
        missing. There is no half file then, and a file of that name remains as it was.
    """
    path = Path(path)
    ending = _ending(path)
    try:
        with _replacing(path) as file:
            if ending in _PERFETTO:
                packet_writer.write(trace, file)
            elif ending == ".json":
                with io.TextIOWrapper(file, encoding="ascii", newline="\n") as text:
                    chrome.write(trace, text)
            else:
                # The name and the time in gzip's header would make equal traces differ.
                with gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
                    with io.TextIOWrapper(packed, encoding="ascii", newline="\n") as text:
                        chrome.write(trace, text)
    except TraceFileError as error:
        raise TraceFileError(f"cannot write {path}: {error}") from error
    except OSError as error:
        raise TraceFileError(f"cannot write {path}: {error.strerror or error}") from error
    except (OverflowError, TypeError, ValueError) as error:
        why = repr(error)[:200]
        raise TraceFileError(
            f"cannot write {path}: a value of the trace does not fit ({why})"
        ) from error


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that gets its name at the end, and is removed after an error."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            yield file
            # The content has to be on the disk before the name is.
            if not file.closed:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def read(path: str | os.PathLike[str]) -> Trace:
    """Read a trace that `write` wrote.

    Raises
    ------
    TraceFileError
        There is no such file, it is damaged, or another program wrote it.
    """
    path = Path(path)
    # Of a file that is not there, its ending is not what matters.
    ending = _ending(path) if path.exists() else ""
    try:
        with open(path, "rb") as file:
            if ending in _PERFETTO:
                return packet_reader.read(file)
            content = gzip.GzipFile(fileobj=file) if ending == ".json.gz" else file
            with io.TextIOWrapper(content, encoding="ascii", newline="\n") as text:
                return chrome.read(text)
    except _DAMAGE as error:
        why = str(error)
        if not isinstance(error, TraceFileError):
            # Some errors contain all of the file.
            why = f"it is damaged, or dask_gpurt did not write it ({repr(error)[:200]})"
        raise TraceFileError(f"{path} is no trace that can be read: {why}") from error
    except OSError as error:
        raise TraceFileError(f"cannot read {path}: {error.strerror or error}") from error


def _ending(path: Path) -> str:
    for ending in ENDINGS:
        if path.name.endswith(ending):
            return ending
    raise TraceFileError(
        f"{path} names no format of traces: end it with {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}"
    )
