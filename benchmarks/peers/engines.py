"""The engines, and the environment that each of them runs in. Loads none of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

WORKS = ("shuffle", "aggregation")

ROOT = Path(__file__).parents[2]
#: `make .venv-peers/installed` makes it.
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"


@dataclass(frozen=True)
class Engine:
    """One way to do the work.

    Attributes
    ----------
    module
        Its adapter, in this package.
    option
        The way of using it, for adapters with several.
    is_peer
        Whether it runs in the environment of the peers. The others run in that of this program.
    works
        The works that it can do.
    """

    name: str
    module: str
    option: str = ""
    is_peer: bool = True
    works: tuple[str, ...] = WORKS

    @property
    def python(self) -> Path:
        return PEERS_PYTHON if self.is_peer else Path(sys.executable)

    def absent(self) -> str | None:
        """Return why there is no environment for it, or None."""
        if self.python.exists():
            return None
        return f"there is no {self.python.relative_to(ROOT)}: run `make .venv-peers/installed`"


ENGINES = (
    Engine("dask_gpurt", "on_dask", "gpurt", is_peer=False),
    Engine("dask, p2p", "on_dask", "p2p", is_peer=False),
    Engine("dask, tasks", "on_dask", "tasks", is_peer=False),
    Engine("spark, local", "on_spark", "local[2]"),
    Engine("spark, local-cluster", "on_spark", "local-cluster[2,1,2048]"),
    Engine("daft, native", "on_daft", "native", works=("aggregation",)),
    Engine("daft, ray", "on_daft", "ray"),
    Engine("ray data", "on_ray"),
    Engine("polars", "on_polars"),
    Engine("duckdb", "on_duckdb"),
)


def chosen(only: Iterable[str]) -> list[Engine]:
    """Return the engines whose names have one of these texts; all if there are none.

    Raises
    ------
    ValueError
        A text is in no name.
    """
    texts = list(only)
    for text in texts:
        if not any(text in engine.name for engine in ENGINES):
            names = ", ".join(engine.name for engine in ENGINES)
            raise ValueError(f"no engine has {text!r} in its name; there are: {names}")
    return [one for one in ENGINES if not texts or any(text in one.name for text in texts)]
