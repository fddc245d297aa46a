"""The levels of `vmap`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

try:
    from torch._functorch.predispatch import _add_batch_dim, _remove_batch_dim
    from torch._functorch.vmap import vmap_increment_nesting

    CHUNKS = True
except ImportError:
    CHUNKS = False

try:
    from torch._subclasses import FakeTensor as _FakeTensor
except ImportError:
    _FakeTensor = None

try:
    from torch._C._functorch import get_unwrapped as _unwrapped
    from torch._C._functorch import is_batchedtensor as _is_batched
    from torch._C._functorch import is_gradtrackingtensor as _is_differentiated
except ImportError:
    _is_batched = _is_differentiated = _unwrapped = None


try:
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as outside_transforms
except ImportError:
    outside_transforms = nullcontext
"""Within, no transform of torch.func looks at what is computed."""


_interpreters = getattr(torch._C._functorch, "peek_interpreter_stack", object)  # pyright: ignore


def is_transformed() -> bool:
    """Whether a transform of torch.func looks at every operator that is called here."""
    return _interpreters() is not None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What functorch does with `torch.nn.functional.linear`, for sizes that are symbols to the compiler, too.

    functorch's own reads the input's sizes as numbers, so a step would be compiled again for every length of sequences.
    """
    if bias is not None and input.dim() == 2:
        return torch.addmm(bias, input, weight.t())
    if bias is not None and input.dim() == 3 and input.is_contiguous():
        rows, columns, features = input.shape
        flat = torch.addmm(bias, input.view(rows * columns, features), weight.t())
        return flat.view(rows, columns, weight.shape[0])
    output = torch.matmul(input, weight.t())
    return output if bias is None else output + bias


with suppress(AttributeError, RuntimeError):  # Heard by the compiler alone, while it traces through functorch.
    torch.ops.aten.linear.default.py_impl(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode)(_linear)


def vmap_with_level(
    function: Callable[[int, list[Tensor]], list[Tensor]], leaves: list[Tensor], size: int
) -> list[Tensor]:
    """`vmap` over the first axis, `size` long, of a function that learns at which level it is; it draws no numbers."""
    with vmap_increment_nesting(size, "error") as level:
        out = function(level, [batched(leaf, level) for leaf in leaves])
        return [unbatched(leaf, level, size) for leaf in out]


def batched(x: Tensor, level: int) -> Tensor:
    """`x`, `[N, ...]`, as the tensor `[...]` that a function under this level of `vmap` sees."""
    return _add_batch_dim(x, 0, level)


def unbatched(x: Tensor, level: int, size: int) -> Tensor:
    """What a function under this level of `vmap` sees as `[...]`, as the `[N, ...]` that it is."""
    return _remove_batch_dim(x, level, size, 0)


def with_workers_first(x: Tensor, dim: int | None, size: int) -> Tensor:
    """An argument of a rule of `vmap` as `[size, ...]`; `dim` is its axis of workers, None where all have the same."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def is_batched(x: Tensor) -> bool:
    """Whether this is one tensor for each worker, under `vmap`."""
    return _is_batched is not None and _is_batched(x)


def is_differentiated(x: Tensor) -> bool:
    """Whether `torch.func.grad` follows what becomes of a tensor."""
    return _is_differentiated is not None and _is_differentiated(x)


def by_worker(leaves: list[Any]) -> list[list[Any]]:
    """Return the leaves of each worker that `vmap` batches here, as plain tensors; one list outside `vmap`."""
    is_row, plain = [], []
    for x in leaves:
        is_row.append(isinstance(x, Tensor) and is_batched(x))
        while _unwrapped is not None and isinstance(x, Tensor) and is_batched(x):
            x = _unwrapped(x)
        plain.append(x)
    workers = max((len(x) for x, row in zip(plain, is_row, strict=True) if row), default=None)
    if workers is None:
        return [plain]
    return [[x[i] if row else x for x, row in zip(plain, is_row, strict=True)] for i in range(workers)]


def has_no_value(x: Tensor) -> bool:
    """Return True if a 0-d tensor has no readable value here (tracing, fake or functional tensor, or batched by `vmap`).

    `torch.compiler.is_compiling` does not tell: it is True in all threads while one of them compiles.
    """
    return torch.compiler.is_dynamo_compiling() or type(x) is not Tensor or is_batched(x)


def are_equal(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors hold the same values, for all workers where `vmap` goes through them at once; NaN equals NaN."""
    while _unwrapped is not None and is_batched(x) and is_batched(y):
        x, y = _unwrapped(x), _unwrapped(y)
    return x.is_meta or type(x) is _FakeTensor or bool((x.eq(y) | (x.ne(x) & y.ne(y))).all())
