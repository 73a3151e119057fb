"""Host memory: pages from the system, pools that keep them warm, and pinned blocks."""
