"""What needs a GPU: `python -m tests.gpu`, or `python -m pytest tests/gpu`. With DECENTFN_TEST_DEVICE=cpu the same runs over gloo."""
