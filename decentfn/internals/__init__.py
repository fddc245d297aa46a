"""Everything here that is private API of PyTorch, in one place: what Inductor must be told, and torch's own pytrees.

Where a piece is missing (another version of PyTorch), the rest stays correct and gets slower: `OVERLAPS` is then
False, collectives wait before they return, scalars are computed where they are used, simulations do not chunk, and
every message has new memory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import heapq
import logging
import operator
import os
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from filelock import FileLock, Timeout
from torch import Tensor
from torch._dynamo import lookup_backend
from torch.utils import _pytree

from decentfn.internals.inductor_on_cpu import even_splits, leave, remembered_probes

try:
    from torch._inductor import config, ir, virtualized
    from torch._inductor.custom_graph_pass import CustomGraphPass as _GraphPass
    from torch._inductor.lowering import make_pointwise, register_lowering

    _LOWERS = True
    OVERLAPS = (
        hasattr(ir, "_CollectiveKernel")
        and hasattr(ir, "_WaitKernel")
        and hasattr(config, "reorder_for_compute_comm_overlap_passes")
    )
except ImportError:
    _LOWERS = OVERLAPS = False
    _GraphPass = object

try:
    from torch._inductor.runtime.cache_dir_utils import cache_dir as _cache_dir
except ImportError:
    _cache_dir = tempfile.gettempdir

try:
    from torch._higher_order_ops.scan import scan as _scan
except ImportError:
    _scan = None

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
    from torch._C._functorch import is_batchedtensor as _is_batched
except ImportError:
    _is_batched = None


def is_unused(storage: torch.UntypedStorage) -> bool:
    """Whether no tensor has this storage, and no other process either; needs `COUNTS_USERS`."""
    return torch._C._storage_Use_Count(storage._cdata) == 1 and not storage.is_shared()


def _counts_users() -> bool:
    held = torch.empty(1)
    storage = held.untyped_storage()
    try:
        before = is_unused(storage)
        del held
        return is_unused(storage) and not before
    except AttributeError:
        return False


_log = logging.getLogger("decentfn")

COUNTS_USERS = _counts_users()

_PATIENCE_S = 600.0
"""So long a rank waits for another one's compiler before it compiles for itself."""


def compile_options() -> dict[str, Any]:
    """Inductor's options with which what is posted first stays first and what is waited for last stays last.

    By default Inductor minimises peak memory and sinks a collective's start next to its wait. Its cache keeps what was
    compiled by graph and options and does not see how operators are implemented, so our sources are among the options.
    """
    if not OVERLAPS:
        return {}
    return {
        "post_grad_custom_post_pass": _StoreEarly(),
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": ["raise_comms", _wait_last],
        "reorder_for_locality": False,
        "score_fusion_memory_threshold": 256,
        "size_asserts": False,
        "alignment_asserts": False,
    }


def _wait_last(nodes: list[Any]) -> list[Any]:
    """Inductor's schedule, waiting only when nothing else can be done, and for what was posted first.

    Its own pass `sink_waits` lets the order of waits follow from where the gradients come from: the first message is
    then often waited for last, and all that needs it comes after the last message is in.
    """
    maker = {name: i for i, node in enumerate(nodes) for name in node.get_buffer_names()}
    needs = [{maker[d.name] for d in node.unmet_dependencies if d.name in maker} - {i} for i, node in enumerate(nodes)]
    users: dict[int, list[int]] = {}
    for i, needed in enumerate(needs):
        for j in needed:
            users.setdefault(j, []).append(i)

    def rank(i: int) -> tuple[bool, int]:
        node = nodes[i].node
        if type(node) is not ir._WaitKernel:
            return False, i
        return True, maker.get(node.inputs[0].get_name(), i)

    ready = [(rank(i), i) for i, needed in enumerate(needs) if not needed]
    heapq.heapify(ready)
    order = []
    while ready:
        _, i = heapq.heappop(ready)
        order.append(nodes[i])
        for j in users.get(i, ()):
            needs[j].discard(i)
            if not needs[j]:
                heapq.heappush(ready, (rank(j), j))
    return order


@functools.cache
def _digest_of_sources() -> str:
    sources = sorted(Path(__file__).parent.parent.rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


class _StoreEarly(_GraphPass):  # pyright: ignore[reportGeneralTypeIssues]
    """Write the donated state as soon as all of it is computed, before what is left of the metrics.

    PyTorch puts those writes last. What comes before them is a loop of its own, what comes after can be part of the
    loop that writes: so the gradient's norm is summed while the update reads the gradient.
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Move the writes at the end of `graph` up to the last value that they need."""
        nodes = list(graph.nodes)
        stores = [node for node in nodes if node.target is torch.ops.aten.copy_.default]
        if not stores:
            return
        needed = {node for store in stores for node in store.all_input_nodes}
        last = max(index for index, node in enumerate(nodes) if node in needed)
        written = {store.args[0] for store in stores}
        for node in nodes:
            # A view of the old state or one of several, a message sent from it, what is on its way or waited for.
            shows = getattr(node.target, "is_view", False) or node.target is operator.getitem
            shows = shows or getattr(node.target, "namespace", "") == "decentfn"
            if shows and node.args and node.args[0] in written:
                written.add(node)
        if any(written.intersection(node.all_input_nodes) for node in nodes[last + 1 :] if node not in stores):
            return  # somebody still looks at the old state, or may be sending it
        for store in reversed(stores):
            nodes[last].append(store)

    def uuid(self) -> str:
        return _digest_of_sources()


def inductor(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Inductor as a backend of torch.compile; of a machine's ranks one compiles, and the others find its code cached.

    Where a note in Inductor's cache says that this was compiled before, nobody waits for anybody.
    """
    compile_with = functools.partial(cast(Any, lookup_backend("inductor")), graph, inputs, config_patches=options)
    with remembered_probes(), even_splits():
        if "MASTER_PORT" not in os.environ:
            return compile_with()
        note = note_of(graph, options or {})
        is_known = os.path.exists(note)
        _log.debug("the graph's code is %s", "in the cache" if is_known else "new: one of the ranks compiles it")
        with contextlib.nullcontext() if is_known else _turn():
            compiled = compile_with()
    leave(note)
    return compiled


def counted(backend: str, graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
    """A backend of torch.compile, by name, that also leaves every graph that it is given in `graphs`."""

    def compile_with(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return cast(Any, lookup_backend(backend))(graph, inputs)

    return compile_with


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """For one rank at once; the others wait until it is done, and then go on together."""
    user = getattr(os, "getuid", int)()
    lock = FileLock(Path(tempfile.gettempdir(), f"decentfn-{user}-{os.environ['MASTER_PORT']}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _log.debug("waiting for the rank that compiles")
        with contextlib.suppress(Timeout), lock.acquire(timeout=_PATIENCE_S):
            pass
    try:
        yield
    finally:
        lock.release()


def note_of(graph: torch.fx.GraphModule, options: dict[str, Any]) -> Path:
    """The same file for graphs whose code Inductor finds again; where it does not, ranks compile at the same time."""
    values = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
    inputs = [(tuple(x.shape), x.stride(), x.dtype, x.device) for x in values if isinstance(x, Tensor)]
    plain = sorted((key, value) for key, value in options.items() if isinstance(value, (bool, int, float, str)))
    about = (graph.code, inputs, plain, torch.get_num_threads(), torch.__version__, _digest_of_sources())
    return Path(_cache_dir(), "decentfn", hashlib.sha256(repr(about).encode()).hexdigest()[:32])


def lower_collectives(collectives: Sequence[Any], wait: Any, complete: Any) -> None:
    """Lower `collectives` (first argument the payload, one tensor returned) and `wait` as Inductor's own kinds.

    What compiled code calls in place of `wait` is `complete`.
    """
    if not OVERLAPS:
        return
    for packet in collectives:
        register_lowering(packet, type_promotion_kind=None)(_lower_collective(packet.default))

    @register_lowering(wait, type_promotion_kind=None)
    def _(x: Any) -> Any:
        ir._WaitKernel.create_wait(complete.default, x)
        return x


def _lower_collective(kernel: Any) -> Callable[..., Any]:
    def lower(x: Any, *rest: Any) -> Any:
        x.realize()  # or what stays here would be computed again, by another kernel
        x = ir.ExternKernel.require_contiguous(x)
        return ir.TensorBox.create(ir._CollectiveKernel.create_out_of_place(kernel, x, *rest))

    return lower


def lower_as_realized(operator: Any) -> None:
    """Lower `operator(x)`, the identity, or `operator(x, dtype)`, a cast, as "store this before anyone reads it".

    Else every kernel computes it for itself, and after a cast to a narrower dtype goes on with the wider value.
    """
    if not _LOWERS:
        return

    def cast_to(dtype: torch.dtype, value: Any) -> Any:  # a bitcast, behind which the wider value is found no more
        return virtualized.ops.to_dtype_bitcast(virtualized.ops.to_dtype(value, dtype), dtype, dtype)

    @register_lowering(operator, type_promotion_kind=None)
    def _(x: Any, dtype: torch.dtype | None = None) -> Any:
        if dtype is not None:
            x = make_pointwise(functools.partial(cast_to, dtype), override_return_dtype=dtype)(x)
        if isinstance(x.data, ir.BaseView):
            return ir.ExternKernel.copy_input(x)  # a part of something else gets memory of its own
        x.realize()
        return x


def lower_as_pointwise(operator: Any, formula: Callable[..., Any]) -> None:
    """Lower an operator of one int64 tensor as `formula(value, constant, shifted)` of each entry, computed once.

    Inductor computes an input of an elementwise operator anew for each place in which it stands; written out in
    PyTorch, n times `x ^ (x >> s)` would cost 2^n to compile. `constant` turns an int into an operand; `shifted` is >>.
    """
    if not _LOWERS:
        return

    def entry(value: Any) -> Any:
        ops = virtualized.ops
        return formula(value, lambda number: ops.constant(number, torch.int64), ops.bitwise_right_shift)

    register_lowering(operator, type_promotion_kind=None)(make_pointwise(entry))


def loop(
    body: Callable[[list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]],
    carry: list[Tensor],
    xs: list[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """`carry, y[i] = body(carry, x[i])` over the first axis of all `xs`; the last carry and all y, stacked.

    Compiled, one loop in the graph, however long; the carry must keep its shapes and dtypes. Without torch's scan the
    loop is unrolled.
    """
    if _scan is not None and torch.compiler.is_compiling():

        def at(carry: list[Tensor], i: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            # Looked up here, not sliced by scan, which has no batching rule for it (a warning under vmap).
            return body(carry, [x.index_select(0, i.view(1)).squeeze(0) for x in xs])

        return _scan(at, carry, torch.arange(xs[0].shape[0], device=xs[0].device))
    rows: list[list[Tensor]] = []
    for i in range(xs[0].shape[0]):
        carry, row = body(carry, [x[i] for x in xs])
        rows.append(row)
    return carry, [torch.stack(column) for column in zip(*rows, strict=True)]


def vmap_with_level(
    function: Callable[[int, list[Tensor]], list[Tensor]], leaves: list[Tensor], size: int
) -> list[Tensor]:
    """`vmap` over the first axis, `size` long, of a function that learns at which level it is; it draws no numbers."""
    with vmap_increment_nesting(size, "error") as level:
        out = function(level, [batched(leaf, level) for leaf in leaves])
        return [unbatched(leaf, level, size) for leaf in out]


def has_no_value(x: Tensor) -> bool:
    """Whether a 0-d tensor cannot be read here: it is being compiled, fake, or one for each worker under `vmap`."""
    return torch.compiler.is_compiling() or type(x) is _FakeTensor or (_is_batched is not None and _is_batched(x))


def batched(x: Tensor, level: int) -> Tensor:
    """`x`, `[N, ...]`, as the tensor `[...]` that a function under this level of `vmap` sees."""
    return _add_batch_dim(x, 0, level)


def unbatched(x: Tensor, level: int, size: int) -> Tensor:
    """What a function under this level of `vmap` sees as `[...]`, as the `[N, ...]` that it is."""
    return _remove_batch_dim(x, level, size, 0)


def register_torch_node(
    cls: type[Any],
    flatten: Callable[[Any], tuple[Sequence[Any], Hashable]],
    unflatten: Callable[[Any, Iterable[Any]], Any],
) -> None:
    """Make `cls` an inner node of torch's own pytrees, which `vmap` and Dynamo walk."""
    _pytree.register_pytree_node(
        cls,
        lambda node: (list(flatten(node)[0]), flatten(node)[1]),
        lambda children, context: unflatten(context, children),
    )
