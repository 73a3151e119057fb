"""dask-image: filters over overlapping chunks, and labels across their borders."""

import json

import dask.array as da
import numpy as np
from dask_image import ndfilters, ndmeasure, ndmorph
from distributed import Client

if __name__ == "__main__":
    generator = np.random.default_rng(0)
    picture = generator.random((120, 90))
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=":0"):
        tiles = da.from_array(picture, chunks=(40, 30))
        smooth = ndfilters.gaussian_filter(tiles, sigma=2)
        bright = smooth > float(smooth.mean().compute())
        labels, n_labels = ndmeasure.label(ndmorph.binary_opening(bright))
        sizes = ndmeasure.area(tiles, labels, da.arange(1, int(n_labels) + 1, chunks=5))
        edges = ndfilters.sobel(tiles.rechunk((120, 10)))
        result = {
            "smooth": smooth.sum(axis=0).compute().tolist(),
            "labels": int(n_labels),
            "sizes": sizes.compute().tolist(),
            "edges": float(abs(edges).sum().compute()),
        }
    print(json.dumps(result))
