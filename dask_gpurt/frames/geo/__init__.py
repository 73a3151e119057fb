"""GeoPandas: columns of geometries, and frames with an active geometry.

`frames.pandas_` carries these frames; this room converts geometries to bytes and back.
"""
