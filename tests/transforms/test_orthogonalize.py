"""`orthogonalize` against the scalar iteration on singular values from an SVD."""

import pytest
import torch

from decentfn.optim.transforms.shaped import orthogonalize


@pytest.mark.parametrize("shape", [(4, 4), (3, 7), (2, 5, 3), (1, 1)])
def test_singular_vectors_stay_and_singular_values_iterate(shape):
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    U, S, Vh = torch.linalg.svd(matrix, full_matrices=False)
    s = S / (S.norm(dim=-1, keepdim=True) + 1e-7)
    for _ in range(3):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(orthogonalize(matrix, steps=3), U @ torch.diag_embed(s) @ Vh, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_singular_values_are_about_one_in_every_dtype(dtype):
    matrix = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    factor = orthogonalize(matrix)
    assert factor.dtype == dtype
    assert ((torch.linalg.svdvals(factor.double()) - 1).abs() < 0.36).all()
    assert torch.equal(orthogonalize(torch.zeros_like(matrix)), torch.zeros_like(matrix))


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64), [[1.0]]])
def test_what_is_no_matrix_is_refused(wrong):
    with pytest.raises(ValueError, match=r"orthogonalize.*\[\.\.\., m, n\]"):
        orthogonalize(wrong)
