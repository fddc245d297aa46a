"""Record the iterates of decent-bench's algorithms on quadratics that differ between workers.

    python tests/decent_bench_records.py       writes tests/data/decent_bench.json

An oracle from outside: decent-bench 0.3.0 (AGPL; it is only run, nothing of it is copied) needs Python 3.13, so this runs by hand in an
environment of its own (`pip install decent-bench==0.3.0`), and `tests/algorithms/test_decent_bench.py` reads the numbers.
"""

import json
from importlib.metadata import version
from pathlib import Path

import networkx as nx
import numpy as np

PATH = Path(__file__).parent / "data" / "decent_bench.json"
WORKERS, DIM, ROUNDS, RATE, LOCAL_STEPS = 5, 2, 20, 0.05, 4
EDGES = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (0, 2)]
LOCAL = {"KGT": {"aux_step_size": 0.9}, "LED": {"aux_step_size": 0.2}}
"""Methods with local steps: their outer or dual rate."""
NAMES = ("DGD", "ATC", "ATC_Tracking", "AugDGM", "EXTRA", "ExactDiffusion", "NIDS", "KGT", "LED")


def main() -> None:
    from decent_array import interoperability as iop
    from decent_bench.agents import Agent
    from decent_bench.algorithms import p2p
    from decent_bench.costs import QuadraticCost
    from decent_bench.networks import P2PNetwork

    iop.set_backend("numpy")
    rng = np.random.default_rng(0)
    factors = rng.normal(size=(WORKERS, DIM, DIM))
    A = factors @ factors.transpose(0, 2, 1) + 0.3 * np.eye(DIM)
    b, start = rng.normal(size=(WORKERS, DIM)), rng.normal(size=(WORKERS, DIM))
    found = {}
    for name in NAMES:
        agents = [Agent(QuadraticCost(iop.from_numpy(A[i]), iop.from_numpy(b[i]))) for i in range(WORKERS)]
        graph = nx.Graph()
        graph.add_nodes_from(range(WORKERS))
        graph.add_edges_from(EDGES)
        network = P2PNetwork(graph, agents)
        options = LOCAL.get(name, {}) | ({"num_local_steps": LOCAL_STEPS} if name in LOCAL else {})
        x0 = {agent: iop.from_numpy(start[i]) for i, agent in enumerate(agents)}
        algorithm = getattr(p2p, name)(step_size=RATE, x0=x0, **options)
        algorithm.initialize(network)
        xs = [start.tolist()]
        for k in range(ROUNDS):
            network._step(k)
            algorithm.step(network, k)
            xs.append([iop.to_numpy(agent.x).astype(np.float64).tolist() for agent in agents])
        found[name] = xs
    given = {"A": A.tolist(), "b": b.tolist(), "W": iop.to_numpy(network.weights).tolist()}
    facts = {"decent-bench": version("decent-bench"), "rate": RATE, "local_steps": LOCAL_STEPS, "options": LOCAL}
    PATH.write_text(json.dumps(facts | given | {"iterates": found}), encoding="utf-8")


if __name__ == "__main__":
    main()
