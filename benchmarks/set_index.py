"""Seconds of `set_index` on an unsorted key, with Dask's default divisions, on both sides."""

from __future__ import annotations

from benchmarks.harness import arguments, compare, two_clusters, write_json
from benchmarks.shuffle import frame, numbers_part


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    rows = int(1_000_000 * options.scale)
    with two_clusters() as sides:
        timing = compare(
            sides,
            "set_index, 16 x 1M rows, unsorted key",
            lambda: frame(numbers_part, 16, rows),
            lambda inputs: inputs[0].set_index("key"),
            repeats=options.repeats,
            target=2.0,
        )
    write_json(options.json, [timing])


if __name__ == "__main__":
    main()
