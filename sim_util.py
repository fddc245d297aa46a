from decentfn.topologies import mixing_matrix


def mats(top, T):
    if top.period and not top.start:
        P = [mixing_matrix(top, p).numpy() for p in range(top.period)]
        return [P[t % len(P)] for t in range(T)]
    return [mixing_matrix(top, t).numpy() for t in range(T)]


def grow(Ms, a, g, seed=0):
    n = Ms[0].shape[0]
