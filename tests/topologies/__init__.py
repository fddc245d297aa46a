def is_doubly_stochastic(matrix, tolerance=1e-12):
    """Return True if rows and columns of `[N, N]` sum to 1 and no entry is negative."""
    sums = (matrix.sum(0), matrix.sum(1))
    return bool((matrix >= -tolerance).all() and all(((x - 1).abs() <= tolerance).all() for x in sums))
