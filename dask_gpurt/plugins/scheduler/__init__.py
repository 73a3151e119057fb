"""The runtime on the scheduler.

`gpurt_scheduler` is the plugin that activation registers. `readiness` knows which workers take
part, and `data_plane_choice` decides which shuffle runs use our data plane.
"""
