"""Plans of runs: bytes, time and memory of a step, predicted from a cluster's links before anything runs."""

from decentfn.planning.methods import Prediction
from decentfn.planning.recommendation import Recommendation, plan
from decentfn.timing import Cluster, Link

__all__ = ["Cluster", "Link", "Prediction", "Recommendation", "plan"]
