"""Checks for your own algorithms, topologies, transforms and compressors; this library's own pass them too.

    check_algorithm(my_algorithm, lambda n: df.topology("one-peer-exp", n))
    check_topology(my_topology(8))
    check_transform(lambda: my_optimizer(1e-3))
    check_compressor(my_compressor())

`hostile(algorithm, 3, lambda x, t: -x)` makes a worker send what a function says. `on_ranks(4, function)` runs a function on four gloo ranks,
threads of this process.
"""

from decentfn.testing.algorithms import PROMISES, check_algorithm, try_promise
from decentfn.testing.checks import check_compressor, check_topology, check_transform
from decentfn.testing.hostility import hostile
from decentfn.testing.ranks import on_ranks
from decentfn.testing.subjects import Law, Subject, mean_is_preserved, replicas_stay_equal

__all__ = [
    "PROMISES",
    "Law",
    "Subject",
    "check_algorithm",
    "check_compressor",
    "check_topology",
    "check_transform",
    "hostile",
    "mean_is_preserved",
    "on_ranks",
    "replicas_stay_equal",
    "try_promise",
]
