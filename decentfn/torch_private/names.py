"""List of the private names of PyTorch that this library uses, with the purpose and the consequence of a missing name.

PyTorch may rename them in any release. They are looked up at import; those of Dynamo and Inductor, which take seconds
to import, in `df.compile`. `import decentfn` and eager traced steps work without any of them. A feature that needs a
missing name is refused when it is built. `tests/torch_private` removes each in turn, and `docs/upgrading.md` has the
table of consequences.
"""

from __future__ import annotations

import functools
import pkgutil
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Private:
    """Private name of PyTorch."""

    name: str  # dotted name, from `torch`
    purpose: str
    without: str  # consequence if PyTorch lacks it

    def find(self) -> Any:
        """Return the object with this name, or None."""
        return _find(self.name)

    def require(self, call: str) -> Any:
        """Return the object with this name, or raise RuntimeError: PyTorch lacks it, and the `call` needs it."""
        found = self.find()
        if found is None:
            raise RuntimeError(
                f"{call}: PyTorch {torch.__version__} has no {self.name}, which decentfn needs here: {self.purpose}. Install the "
                "version of PyTorch that docs/upgrading.md names; or do without compiling, df.donate(step)."
            )
        return found


@functools.cache
def _find(name: str) -> Any:
    owner, _, attribute = name.rpartition(".")
    try:
        return getattr(pkgutil.resolve_name(owner), attribute)
    except (ImportError, AttributeError):
        return None


PYTREE = Private(
    "torch.utils._pytree.register_pytree_node",
    "torch.func takes a training state as a tree",
    "torch.func.vmap and torch.func.grad refuse a state; steps, simulated or compiled, do not change",
)
FUNCTORCH = Private(
    "torch._C._functorch",
    "know what is batched over simulated workers, read it, batch operators over them, and take gradients, at little cost",
    "eager traced steps are slower",
)
_OF_BATCHING = (
    "compile a simulation, and a linear layer, for any size of a batch",
    "a step is compiled again for every size of its batches",
)
BATCHING = Private("torch._C.DispatchKey", *_OF_BATCHING)
DECOMPOSITIONS = Private("torch._decomp.decomposition_table", *_OF_BATCHING)
_OF_DISPATCH = (
    "know and restore, inside the gradient's operator, what PyTorch's dispatcher does outside it",
    "df.autograd is refused",
)
DISPATCH = tuple(
    Private(f"torch._C.{name}", *_OF_DISPATCH)
    for name in ("_dispatch_tls_local_include_set", "_dispatch_tls_local_exclude_set", "_ForceDispatchKeyGuard")
)
WEIGHTS = Private(
    "torch.nn.utils.stateless._reparametrize_module",
    "give a module other weights in compiled code, where Dynamo lets nothing else write to a module",
    "df.compile is refused",
)
GUARDS = Private(
    "torch._dynamo.config",
    "recompile where a module's hooks change, or two parameters become one",
    "df.compile is refused",
)
BACKEND = Private(
    "torch._dynamo.lookup_backend",
    "let one rank of a machine compile and the others load its code",
    'df.compile with the backend "inductor" is refused',
)
GRAPH_PASS = Private(
    "torch._inductor.custom_graph_pass.CustomGraphPass",
    "keep what a donated step reads of its old state, and the order in which the processes of a worker wait for one another",
    'df.compile with the backend "inductor" is refused',
)
LOOP_SPLIT = Private(
    "torch._inductor.codegen.cpp.CppScheduling.try_loop_split",
    "keep Inductor from forgetting the rest of a loop",
    'df.compile with the backend "inductor" is refused',
)
READ_EXPR = Private(
    "torch._inductor.loop_body.LoopBody.get_read_expr",
    "keep Inductor from failing at a tensor that is written over in a loop",
    "some steps fail to compile, with PyTorch's KeyError",
)

VECTORS = Private(
    "torch._inductor.cpu_vec_isa.valid_vec_isa_list",
    "try the CPU's vector instructions again after a damaged cache",
    "a cache whose trial of vector instructions is damaged fails until it is removed",
)
_OF_STEPS = PYTREE, FUNCTORCH, BATCHING, DECOMPOSITIONS, *DISPATCH, WEIGHTS
NAMES = *_OF_STEPS, GUARDS, BACKEND, GRAPH_PASS, LOOP_SPLIT, READ_EXPR, VECTORS
