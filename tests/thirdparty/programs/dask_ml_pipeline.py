"""A program with dask-ml: a grid search, scaling, clustering, and a blockwise model."""

import json

import dask.array as da
import numpy as np
from dask_ml.cluster import KMeans
from dask_ml.linear_model import LinearRegression
from dask_ml.model_selection import GridSearchCV
from dask_ml.preprocessing import StandardScaler
from dask_ml.wrappers import ParallelPostFit
from distributed import Client
from sklearn.linear_model import SGDClassifier
from sklearn.naive_bayes import GaussianNB

if __name__ == "__main__":
    generator = np.random.default_rng(0)
    centres = generator.integers(0, 2, 1200)
    points = generator.normal(size=(1200, 4)) + 6 * centres[:, None]
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=":0"):
        features = da.from_array(points, chunks=(200, 2)).rechunk((300, 4))
        labels = da.from_array(centres, chunks=300)
        scaled = StandardScaler().fit_transform(features)
        clusters = KMeans(n_clusters=2, random_state=0, init_max_iter=2).fit(scaled)
        line = LinearRegression(solver="lbfgs").fit(scaled, scaled[:, 0] * 3 + 1)
        search = GridSearchCV(SGDClassifier(random_state=0), {"alpha": [1e-4, 1e-2, 1.0]}, cv=3)
        search.fit(features, labels)
        bayes = ParallelPostFit(GaussianNB()).fit(points[:300], centres[:300])
        guessed = bayes.predict(features).compute()
        result = {
            "mean": scaled.mean(axis=0).compute().tolist(),
            "centres": sorted(np.round(clusters.cluster_centers_[:, 0], 4).tolist()),
            "line": np.round(line.coef_, 3).tolist(),
            "score": float(search.best_score_),
            "tried": len(search.cv_results_["params"]),
            "guessed": int(guessed.sum()),
        }
    print(json.dumps(result))
