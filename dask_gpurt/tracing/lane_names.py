"""Names of the lanes of a trace, of the paths in them, and of a sample.

Code that records events needs these alone: `tracing.events` has the records of a whole trace, and
workers that are not traced do without them.
"""

from __future__ import annotations

#: Lanes that do not come from the ledger: parts of a shuffle inside of tasks, and transfers of task
#: outputs between workers, which are Dask's own.
PHASE, FETCH = "phase", "fetch"
#: Lane of broadcasts and of operations of groups.
COLLECTIVE = "collective"
#: Paths of messages in the lane `communication`. A relay hands on bytes that another worker sent to
#: it: its peers receive them, and counters of sent bytes do not have them. A message that failed is
#: `UNSENT`. Sends in the lane `collective` have paths of their own.
SEND, RECEIVE, RELAY, UNSENT = "send", "receive", "relay", "unsent"
#: All messages have numbers. Those with another path than these were sent, and their peer has an
#: entry with the path `RECEIVE` and the same number.
NOT_SENDS = (RECEIVE, UNSENT)
#: Name of a regular sample of each worker: the share of a core that its process uses.
CPU = "cpu"
