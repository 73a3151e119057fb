"""Task outputs as plain nodes and buffers, and back."""
