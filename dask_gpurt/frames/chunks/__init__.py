"""Chunks of arrays: which part goes where, and their cutting, packing and joining.

`rechunking` computes with numbers alone. `chunk_layout` describes the memory of a chunk,
`open_chunk` cuts it into shards, and `arrays` is the adapter that joins the outputs.
"""
