"""A program with scikit-learn's grid search and forest on joblib's Dask backend."""

import json

import joblib
from distributed import Client
from sklearn.datasets import make_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV

if __name__ == "__main__":
    features, labels = make_classification(n_samples=400, n_features=8, random_state=0)
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=":0"):
        search = GridSearchCV(LogisticRegression(), {"C": [0.01, 0.1, 1.0]}, cv=3)
        # Arrays are scattered first, and every task uses their futures.
        with joblib.parallel_backend("dask", scatter=[features, labels]):
            search.fit(features, labels)
        with joblib.parallel_backend("dask"):
            forest = RandomForestClassifier(n_estimators=12, random_state=0)
            forest.fit(features, labels)
    print(
        json.dumps(
            {
                "best": search.best_params_,
                "scores": search.cv_results_["mean_test_score"].tolist(),
                "forest": forest.predict_proba(features[:20]).tolist(),
            }
        )
    )
