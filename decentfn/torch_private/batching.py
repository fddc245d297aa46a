"""Rules by which the compiler batches operators over workers, for sizes that are symbols.

torch.func's own rules, in C++, read all sizes as numbers, even for the number of workers alone (`Tensor::size`), so a
compiled simulation would be compiled again for every size of a batch, or fail. These replace them where a size is a symbol;
eager steps and fixed sizes keep PyTorch's own. A step with an operator that is not listed is compiled again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import optree
import torch
from torch import Tensor

from decentfn.torch_private.functorch import all_rows, row
from decentfn.torch_private.names import BATCHING, DECOMPOSITIONS

_leaves: Callable[..., list[Any]] = optree.tree_leaves
_map: Callable[..., Any] = optree.tree_map
_aten = torch.ops.aten
_library = torch.library.Library("aten", "IMPL")
_library.impl("sym_size.int", lambda x, dim: x.shape[dim], "FuncTorchBatched")  # of a loop over micro-batches

_MOVED = {
    # Operators that do the same to all rows if their argument `dim`, of this position and default, counts the workers' axis.
    **{_aten.cat.default: (1, 0), _aten.gather.default: (1, 0), _aten.scatter_add.default: (1, 0)},
    **{_aten.scatter_reduce.two: (1, 0), _aten.cumsum.default: (1, 0)},
    **{_aten.scatter.src: (1, 0), _aten.scatter.value: (1, 0), _aten.max.dim: (1, 0), _aten.min.dim: (1, 0)},
    **{_aten.topk.default: (2, -1), _aten.sort.default: (1, -1), _aten.unfold.default: (1, 0)},
    **{op.default: (2, 0) for op in (_aten.select_backward, _aten.slice_backward, _aten.unfold_backward)},
}

_CONVOLUTIONS = {_aten.convolution.default: (2, 8), _aten.convolution_backward.default: (3, 9)}
"""Positions of the bias, or of its size, and of the number of groups."""

_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu
_LOOPED = (_ATTENTION.default, _aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
"""Operators that PyTorch batches by a loop over the workers."""

_SAMPLES = (
    *_LOOPED,
    *(_aten.max_pool2d_with_indices.default, _aten.max_pool2d_with_indices_backward.default),
    *(_aten.avg_pool2d.default, _aten.avg_pool2d_backward.default),
    *(_aten._adaptive_avg_pool2d.default, _aten._adaptive_avg_pool2d_backward.default),
)
"""Operators on independent samples `[B, C, H, W]`: those of all workers are one batch."""

_WRITTEN_OUT = (
    *(_aten.native_layer_norm, _aten.native_layer_norm_backward, _aten.gelu, _aten.gelu_backward),
    *(_aten.native_batch_norm, _aten.native_batch_norm_backward, _aten._native_batch_norm_legit),
    *(_aten.nll_loss_forward, _aten.nll_loss_backward, _aten.nll_loss2d_forward, _aten.nll_loss2d_backward),
    *(_aten.binary_cross_entropy_with_logits, _aten.native_dropout_backward, _aten.embedding_dense_backward),
    _aten.index_add,
)
"""Operators that PyTorch's own decomposition writes in terms of others."""


def _of_rows(args: Sequence[Any], compute: Callable[[list[Any]], Any]) -> Any:
    """Return `compute` of the arguments `[N, ...]`, each worker its row of the results."""
    like = [x for x in _leaves(args) if isinstance(x, Tensor)]
    out = compute(_map(lambda x: all_rows(x, *like) if isinstance(x, Tensor) else x, list(args)))
    return _map(lambda x: row(x, *like) if isinstance(x, Tensor) else x, out)


def _moved(op: Any, *args: Any, **kwargs: Any) -> Any:
    place, default = _MOVED[op]
    given = [*args, default] if len(args) == place else list(args)

    def compute(rows: list[Any]) -> Any:
        if isinstance(rows[0], list):  # of torch.cat, which leaves out empty vectors
            rows[0] = [x for x in rows[0] if x.dim() != 2 or x.shape[1] != 0] or rows[0]
        elif isinstance(rows[1], (list, tuple)):  # sizes
            rows[1] = [rows[0].shape[0], *rows[1]]
        rows[place] += rows[place] >= 0
        return op(*rows, **kwargs)

    return _of_rows(given, compute)


def _convolution(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Convolve all workers' images at once, with a group, or groups, for each."""
    bias, groups = _CONVOLUTIONS[op]
    of_images = bias - 1  # the images come first, and the gradient of the result before them

    def compute(rows: list[Any]) -> Any:
        workers, samples = rows[0].shape[:2]
        rows[:of_images] = [x.transpose(0, 1).flatten(1, 2) for x in rows[:of_images]]
        rows[of_images] = rows[of_images].flatten(0, 1)
        if isinstance(rows[bias], Tensor):
            rows[bias] = rows[bias].flatten()
        elif rows[bias] is not None:
            rows[bias] = [workers * size for size in rows[bias]]
        rows[groups] *= workers
        out = op(*rows, **kwargs)
        if isinstance(out, Tensor):
            return out.unflatten(1, (workers, -1)).transpose(0, 1)
        images, *others = out
        images = None if images is None else images.view(samples, workers, -1, *images.shape[2:]).transpose(0, 1)
        return images, *(None if x is None else x.unflatten(0, (workers, -1)) for x in others)

    return _of_rows(args, compute)


def _samples(op: Any, *args: Any, **kwargs: Any) -> Any:
    mask = kwargs.get("attn_mask")
    shared = mask is None or mask.dim() == 2 and type(mask) is not Tensor  # a batched one has the plain type here

    def compute(rows: list[Any]) -> Any:
        *rows, mask = rows
        first = rows[0].shape[:2]
        if not shared:
            mask = mask.reshape(mask.shape[0], *[1] * (5 - mask.dim()), *mask.shape[1:])
            kwargs["attn_mask"] = mask.expand(*first, *mask.shape[2:]).flatten(0, 1)
        out = op(*(x.flatten(0, 1) if isinstance(x, Tensor) else x for x in rows), **kwargs)
        return _map(lambda x: x.unflatten(0, first), out)

    return _of_rows([*args, None if shared else mask], compute)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is not None and input.dim() == 2:
        return torch.addmm(bias, input, weight.t())
    if bias is not None and input.dim() == 3 and input.is_contiguous():
        rows, columns, features = input.shape
        flat = torch.addmm(bias, input.view(rows * columns, features), weight.t())
        return flat.view(rows, columns, weight.shape[0])
    output = torch.matmul(input, weight.t())
    return output if bias is None else output + bias


def _group_norm(
    input: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    _: Any = None,
) -> Tensor:
    parts = input.unflatten(1, (groups, -1))
    output = torch.nn.functional.layer_norm(parts, parts.shape[2:], eps=eps).flatten(1, 2)
    of_channels = (-1, *[1] * (input.dim() - 2))
    output = output if weight is None else output * weight.view(of_channels)
    return output if bias is None else output + bias.view(of_channels)


def _bilinear(one: Tensor, other: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    halves = (one @ weight.movedim(0, 1).flatten(1)).unflatten(-1, (weight.shape[0], weight.shape[2]))
    output = (halves * other.unsqueeze(-2)).sum(-1)
    return output if bias is None else output + bias


def _take_along_dim(x: Tensor, index: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:
        return x.flatten().gather(0, index.flatten())
    sizes = [own if other == 1 else other for own, other in zip(x.shape, index.shape, strict=True)]
    dim %= x.dim()
    ends = sizes[:dim], sizes[dim + 1 :]
    return x.expand(*ends[0], -1, *ends[1]).gather(dim, index.expand(*ends[0], -1, *ends[1]))


def _embedding_bag(
    weight: Tensor,
    index: Tensor,
    offsets: Tensor,
    scaled: bool = False,
    mode: int = 0,
    sparse: bool = False,
    factors: Tensor | None = None,
    has_end: bool = False,
    padding: int | None = None,
) -> Any:
    if scaled or padding is not None or mode == 2:  # of equal maxima one has the gradient
        return NotImplemented
    starts = offsets[: offsets.shape[0] - has_end]
    begun = index.new_zeros(index.shape[0] + 1)  # the last bags may be empty
    bag = begun.index_add(0, starts, torch.ones_like(starts))[:-1].cumsum(0) - 1
    rows = weight[index] if factors is None else weight[index] * factors.unsqueeze(-1)
    sizes = torch.zeros_like(starts).index_add(0, bag, torch.ones_like(bag))
    output = rows.new_zeros((starts.shape[0], rows.shape[1])).index_add(0, bag, rows)
    output = output / sizes.clamp(min=1).unsqueeze(-1) if mode == 1 else output
    return output, bag, sizes, sizes


def _install(op: Any, rule: Callable[..., Any], key: Any, always: bool = False) -> None:
    def batched(*args: Any, **kwargs: Any) -> Any:
        shapes = [x.shape for x in _leaves((args, kwargs)) if isinstance(x, Tensor)]
        has_symbols = always or any(isinstance(size, torch.SymInt) for shape in shapes for size in shape)
        if shapes[0] and has_symbols and (out := rule(*args, **kwargs)) is not NotImplemented:
            return out
        return op._op_dk(key, *args, **kwargs)

    op.py_impl(key)(batched)


_turn = threading.Lock()


def install() -> None:
    """Give the rules to the compiler, once; without PyTorch's names for them it keeps its own."""
    with _turn:  # ranks may be threads
        _install_all()


@cache
def _install_all() -> None:
    keys, written_out = BATCHING.find(), DECOMPOSITIONS.find()
    if keys is None or written_out is None:
        return
    first, batched = keys.FuncTorchDynamicLayerFrontMode, keys.FuncTorchBatched
    _aten.linear.default.py_impl(first)(_linear)
    _install(_aten.group_norm.default, _group_norm, first)
    _install(_aten.bilinear.default, _bilinear, first)
    _install(_aten.take_along_dim.default, _take_along_dim, first)
    for op in (_aten.embedding_bag.default, _aten.embedding_bag.padding_idx):
        _install(op, _embedding_bag, first)
    _install(_aten.dropout.default, written_out[_aten.dropout.default], first)
    for rule, ops in ((_moved, _MOVED), (_convolution, _CONVOLUTIONS), (_samples, _SAMPLES)):
        for op in ops:
            _install(op, partial(rule, op), batched, always=op in _LOOPED)
    _install(_aten.embedding.default, lambda weight, index, *_: weight[index], batched)
    _install(_aten.index_select.default, lambda x, dim, index: x[(slice(None),) * (dim % x.dim()) + (index,)], batched)
    for packet in _WRITTEN_OUT:
        for op in (getattr(packet, name) for name in packet.overloads()):
            if op in written_out:
                _install(op, written_out[op], batched)
