"""How long tests wait for anything: processes, answers, events."""

from __future__ import annotations

#: Far more seconds than anything takes on a slow machine. A test that reaches it has found a hang.
HANG_S = 240
