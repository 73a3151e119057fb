"""The runtime on one worker.

`worker_runtime` holds the state that shuffles share, and outlives the plugin while runs need it.
`attachment` hooks the runtime into the worker. `plugins.bootstrap` makes the attachment.
"""
