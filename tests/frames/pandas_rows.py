"""The results of pandas itself, for suites of adapters with pandas frames."""

from __future__ import annotations

import pandas as pd


class PandasRows:
    def rows_of(self, frame, slot):
        chosen = frame[frame["slot"] == slot].drop(columns="slot")
        if isinstance(chosen.index, pd.RangeIndex):
            chosen.index = pd.Index(chosen.index.to_numpy())
        return chosen

    def joined(self, frames):
        return pd.concat(frames)

    def assert_equal(self, got, expected):
        pd.testing.assert_frame_equal(got, expected)
