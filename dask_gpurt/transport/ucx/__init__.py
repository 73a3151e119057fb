"""UCX links between workers, beside Dask's own connections.

A worker's event loop uses an `engine`. Its `thread` alone calls UCX: it drives a `switchboard`,
which has the links to peers (`links`) and their transfers (`posted_transfers`). `context` opens
UCX; `listening_sockets` and `invited_peers` restrict who may connect; `protocol` encodes greetings
and envelopes; and `unwanted_parcels` receives data that nobody asked for.
"""
