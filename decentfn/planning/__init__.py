"""Plans of runs: bytes, time and memory of a step, predicted from a cluster's links before anything runs."""

from decentfn.planning.cluster import Cluster, Link
from decentfn.planning.methods import Prediction
from decentfn.planning.plan import Plan, plan

__all__ = ["Cluster", "Link", "Plan", "Prediction", "plan"]
