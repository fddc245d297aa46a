"""What every compressor promises."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from decentfn.buckets import BucketPlan, flatten
from decentfn.compressors import Compressor, Key
from decentfn.engine.compilation import compile
from decentfn.testing import problem

_DRAWS = 20


def check_compressor(
    compressor: Compressor, *, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64, torch.bfloat16)
) -> None:
    """Try a compressor on small buckets of these dtypes.

    Its messages have the planned number of bytes; a message of zeros means zeros; it contracts by the δ that it
    promises; it is a function of the bucket and the key; traced (aot_eager) and under `vmap` it says and hears the same.

    Raises:
        AssertionError: a promise is broken.
    """
    for dtype in dtypes:
        x = flatten(problem.params(0, (dtype,)), bucket_mb=problem.BUCKET_MB)
        for index, (bucket, plan) in enumerate(zip(x, x.plan.buckets, strict=True)):
            _check(compressor, bucket, plan, index)


def _check(compressor: Compressor, x: Tensor, plan: BucketPlan, index: int) -> None:
    name = f"{compressor.name} on {plan.dtype}[{plan.numel}]"

    def there_and_back(x: Tensor, t: Tensor, worker: Tensor) -> tuple[Tensor, Tensor]:
        message = compressor.compress(x, plan, Key(t, worker, index))
        return message, compressor.decompress(message, plan)

    t, me = torch.tensor(3), torch.tensor(1)
    message, heard = there_and_back(x, t, me)
    assert message.dtype == torch.uint8 and list(message.shape) == [compressor.nbytes(plan)], (
        f"{name}: a message of {message.dtype}{list(message.shape)}, planned are {compressor.nbytes(plan)} bytes"
    )
    assert heard.dtype == plan.dtype and heard.shape == x.shape, f"{name}: {heard.dtype}{list(heard.shape)} was heard"
    silence = compressor.decompress(torch.zeros_like(message), plan)
    assert not silence.any(), f"{name}: a message of zeros is not heard as zeros"
    assert torch.equal(there_and_back(x, t, me)[0], message), f"{name}: the same bucket and key give another message"

    _check_contraction(compressor, x, plan, there_and_back, name)
    as_step = compile(
        lambda x, me, t: (x, there_and_back(x, torch.as_tensor(t), me)), donate=False, backend="aot_eager"
    )
    _, traced = as_step(x, me, 3)
    rows = vmap(there_and_back, in_dims=(0, None, 0))(torch.stack([x, x.flip(0)]), t, torch.tensor([1, 2]))
    apart = [there_and_back(x, t, me), there_and_back(x.flip(0), t, torch.tensor(2))]
    assert torch.equal(traced[0], message) and torch.equal(traced[1], heard), f"{name}: traced, it says something else"
    for i, (_, heard) in enumerate(apart):
        torch.testing.assert_close(rows[1][i], heard, msg=lambda text, i=i: f"{name}, worker {i} under vmap: {text}")


def _check_contraction(compressor: Compressor, x: Tensor, plan: BucketPlan, there_and_back: object, name: str) -> None:
    delta = compressor.delta(plan)
    if delta is None:
        return
    errors = []
    for k in range(_DRAWS):
        y = torch.randn(x.shape, generator=torch.Generator().manual_seed(k)).to(x.dtype)
        _, heard = there_and_back(y, torch.tensor(k), torch.tensor(0))  # type: ignore[operator]
        errors.append(((y.double() - heard.double()) ** 2).sum() / (y.double() ** 2).sum())
    rounding = 4 * torch.finfo(plan.dtype).eps
    mean, bound = float(torch.stack(errors).mean()), (1 - delta) + rounding
    # Random compressors promise a mean: three standard errors are allowed for.
    slack = 3 * float(torch.stack(errors).std()) / _DRAWS**0.5
    assert mean <= bound + slack, f"{name}: it leaves {mean:.3g} of ‖x‖², more than 1 - δ = {1 - delta:.3g}"
