"""Tests that need a GPU: `python -m tests.gpu`, or pytest on this folder; over gloo with DECENTFN_TEST_DEVICE=cpu."""
