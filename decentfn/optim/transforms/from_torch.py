"""Optimizers with PyTorch's interface as pairs `(init, update)`: their state is data, and their step one operator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from decentfn.core import PyTree, brief, brief_error, by_handle, context, draws, handle_of, operator, require, trees
from decentfn.core.buckets import Buckets, Plan, each, loose, wide
from decentfn.optim.transforms.torch_form import (
    CALL,
    TRIALS,
    Form,
    Named,
    Places,
    TorchState,
    leaves_of,
    named_leaves,
    ones,
    parameter,
    sends,
    trial_gradient,
)
from decentfn.optim.transforms.transform import Transform, descending, require_one_process
from decentfn.torch_private.autograd import version
from decentfn.torch_private.dynamo import constant_while_traced


def from_torch(
    make: Callable[[Named], Any], lr_scheduler: Callable[[Any], Any] | None = None, *, elementwise: bool = False
) -> Transform:
    """Turn an optimizer of `torch.optim`, or another with its interface, into a pair `(init, update)`.

    In every step `make` builds the optimizer again, and one operator, eager also in a compiled step, gives it its state
    and takes a step. Each leaf is a parameter of its own, in its shape, unless the optimizer is `elementwise`. On a GPU the operator waits for the numbers of
    the state. `df.set_learning_rate` sets the rates, unless they follow a scheduler. Optimizers of this library compile
    to one kernel per bucket and are faster.

    Args:
        make: `make(params) -> optimizer`, where `params` is a list of (dotted name, parameter), as
            `module.named_parameters()` yields them: in its order, with Python attributes. torch's optimizers accept it;
            groups may be made by name, place or attribute.
        lr_scheduler: `lr_scheduler(optimizer) -> scheduler`, whose `step()` is called once after every update. A
            scheduler of a metric is refused: set the rate between steps.
        elementwise: True if the optimizer treats all elements alike, as SGD and AdamW do and Muon, Adafactor and LAMB do
            not. Each bucket is then one parameter, named by its number: faster on many small leaves, and possible for
            workers of several processes. For groups use `df.transforms.partition`.

    `init` takes some steps of it on other numbers, to learn what it keeps and that nothing else is needed. One with
    methods train and eval (schedulefree) trains in the one mode; `df.params` and evaluations are of the other.

    Raises:
        ValueError: `make` is not a function; from `init`, it does not return an optimizer, the optimizer needs a
            closure, sparse gradients or a metric, sends messages, or keeps lists, dicts, or anything outside of `state`
            and `param_groups`, or a worker is several processes and the optimizer not elementwise.

    >>> import decentfn as df
    >>> optimizer = df.from_torch(lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.9))
    """
    rule = "expected a function of the parameters: df.from_torch(lambda params: torch.optim.AdamW(params, lr=1e-3))."
    require(callable(make), "from_torch", rule, make=make)
    rule = "a function of the optimizer: lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)."
    require(lr_scheduler is None or callable(lr_scheduler), "from_torch", rule, lr_scheduler=lr_scheduler)
    adapter = _Adapter(make, lr_scheduler, elementwise)
    handle = handle_of(adapter)
    number = str(int(handle)).encode()  # bytes, which ranks do not compare: one may have made other objects before

    def init(params: Buckets) -> TorchState | tuple[()]:
        if not elementwise:
            require_one_process("from_torch", params, "it needs whole leaves, unless you pass elementwise=True")
        if not len(params):
            return ()
        plan = adapter.plan(params.plan.number())
        form = adapter.form(plan, plan.number(), params[0].device)
        state = form.first_state(Buckets(params.tensors, plan))
        state = trees.map_nodes(Buckets, lambda node: Buckets(node.tensors, params.plan), state)
        return adapter.state_type(params.plan)(*state) if form.has_modes else state

    def update(grads: Buckets, state: TorchState, params: Buckets) -> tuple[Buckets, PyTree]:
        if not len(grads):  # of a mask that takes no leaf
            return grads, state
        # Copies, which a donated compiled step does not make: it lets the operator write over the old state.
        new, state = each(torch.clone, params), trees.map(torch.clone, state)
        used = context.used[-1] if context.used else None
        rule = (
            "a bucket is one parameter, and skip_unused of df.autograd leaves out leaves; leave elementwise=True out."
        )
        require(used is None or not elementwise, "from_torch(make, elementwise=True)", rule)
        flags = () if used is None else zip(used.plan.buckets, used, strict=True)
        own = [flag for plan, flag in flags if any(plan is bucket for bucket in params.plan.buckets)]  # of a part
        _step([*grads, *own], list(new), trees.leaves(state), handle, _plan_number(number, params.plan.number()), 0)
        return each(lambda y, x: (y.to(wide(y.dtype)) - x.to(wide(x.dtype))).to(x.dtype), new, params), state

    made = descending(init, update)
    made.is_own = not elementwise
    return made


class _Adapter:
    """Builder of optimizers, with the forms of their states and the options that a scheduler gives them."""

    def __init__(
        self, make: Callable[[Named], Any], lr_scheduler: Callable[[Any], Any] | None, elementwise: bool
    ) -> None:
        self._make, self._lr_scheduler, self._elementwise = make, lr_scheduler, elementwise
        self._plans: dict[int, Plan] = {}  # of the parameters, by the number of the plan of the buckets
        self._forms: dict[tuple[int, torch.device], Form] = {}
        self._types: dict[int, type[TorchState]] = {}
        # Of a plan's number, by their steps: optimizers, their schedulers and first options.
        self._scheduled: dict[int, dict[int, tuple[Any, Any, Any]]] = {}
        self._lock = threading.RLock()

    def plan(self, number: int) -> Plan:
        """Return the plan of the optimizer's parameters, which are leaves, or buckets if it is elementwise."""
        if number not in self._plans:
            plan = by_handle(number)
            self._plans[number] = loose(plan.without_values()).plan if self._elementwise else plan
        return self._plans[number]

    def optimizer(self, named: Named, plan: Plan) -> Any:
        """Return an optimizer of these parameters, in train mode if it has modes."""
        places = [segment.place for bucket in plan.buckets for segment in bucket.segments]
        try:
            optimizer = self._make([named[i] for i in sorted(range(len(named)), key=places.__getitem__)])
        except Exception as error:
            raise ValueError(
                f"{CALL}: make(params) raised {brief_error(error)}; it is a function of one argument, a list of (name, "
                "parameter), and returns an optimizer of them: lambda params: torch.optim.AdamW(params, lr=1e-3)."
            ) from error
        own = {id(p) for _, p in named}
        if not all(hasattr(optimizer, name) for name in ("param_groups", "state", "step")):
            rule = f"{CALL}: make(params) returned {brief(optimizer)}; expected an optimizer,"
            raise ValueError(f"{rule} torch.optim.AdamW(params, lr=1e-3).")
        foreign = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
        rule = f"{foreign} of the optimizer's parameters are not its argument's; make it of those:"
        require(not foreign, CALL, f"{rule} lambda params: torch.optim.AdamW(params, lr=1e-3).")
        if hasattr(optimizer, "eval"):
            optimizer.train()
        return optimizer

    def form(self, plan: Plan, number: int, device: torch.device) -> Form:
        """Return the form of the state for parameters of this plan, which has this number."""
        key = number, device
        if torch.compiler.is_dynamo_compiling():
            # By `init` in a step of `df.guard`: no trial steps there, and `df.stack` may have changed the layout.
            same = [form for form in self._forms.values() if form.leaves == leaves_of(plan) and form.device == device]
            rule = "to compile df.guard over it in a simulation, each leaf is a parameter; leave elementwise=True out."
            require(len(same) > 0, CALL, rule)
            return same[0]
        with self._lock:
            if key not in self._forms:
                named = named_leaves(plan, ones(plan, device).leaves())
                does_send = sends(self.optimizer(named, plan), named, trial_gradient(plan, device))
                rule = "its optimizer sends messages by torch.distributed in a step; take its version for one process."
                require(not does_send, CALL, rule)
                named = named_leaves(plan, ones(plan, device).leaves())
                optimizer = self.optimizer(named, plan)
                if self._lr_scheduler is not None:
                    try:
                        self.options(1, named, plan)
                    except Exception as error:
                        raise ValueError(
                            f"{CALL}: its scheduler raised {brief_error(error)}; lr_scheduler(optimizer) returns one whose step() takes no "
                            "argument, as those of torch.optim.lr_scheduler. Give another one such a step(), in a class that counts; for "
                            "one that follows a metric use df.set_learning_rate between steps; for none, or for an optimizer whose lr is "
                            "None, leave lr_scheduler out."
                        ) from error
                form = Form(plan, optimizer, named, self._lr_scheduler is not None)
                self._require_complete(form, optimizer, named)
                self._forms[key] = form
            return self._forms[key]

    def _require_complete(self, form: Form, optimizer: Any, named: Named) -> None:
        """Raise ValueError unless an optimizer that is rebuilt in every step arrives where this one did."""
        arrived = [leaf.detach() for _, leaf in named]
        x = ones(form.plan, form.device)
        state = form.first_state(x)
        name = type(optimizer).__name__
        way_out = "Use another one."
        if self.optimizer(named, form.plan).state:  # load_state_dict keeps what it is given, in which steps write
            way_out = "If make loads its state, let it load a copy, copy.deepcopy(saved); else use another one."
        try:
            for trial in range(TRIALS):
                self.step(form, trial_gradient(form.plan, form.device, trial), x, state, [], is_trial=True)
        except Exception as error:
            raise ValueError(f"{CALL}: {name}, rebuilt with what it keeps, raised {brief_error(error)}.") from error
        for (of_leaf, _), leaf, end in zip(named, x.leaves(), arrived, strict=True):
            if not end.numel():
                continue
            rule = f"{name} makes {of_leaf!r} NaN in {TRIALS} trial steps; look at its numbers, such as lr."
            require(not end.isnan().any(), CALL, rule)
            rounding = 16 * torch.finfo(end.dtype).eps
            is_equal = torch.allclose(leaf, end, rtol=0, atol=rounding + 1e-3 * float((end - 1).abs().max()))
            rule = (
                f"{name} remembers more than what it keeps of each parameter and in its groups, or draws random numbers: rebuilt "
                f"with these, it takes other steps; after {TRIALS} from the same gradients, {of_leaf!r} differs. {way_out}"
            )
            require(is_equal, CALL, rule)

    def options(self, count: int, named: Named, plan: Plan) -> list[dict[str, Any]]:
        """Return the options of each group that the scheduler's first `count` steps have set."""
        assert self._lr_scheduler is not None
        with self._lock:
            schedulers = self._scheduled.setdefault(plan.number(), {})
            done = max((steps for steps in schedulers if steps <= count), default=-1)  # workers' counts may differ
            if done < 0:
                empty: Named = [(name, parameter(p.new_zeros(()).expand(p.shape), vars(p))) for name, p in named]
                optimizer = self.optimizer(empty, plan)
                # A step would change counters. A scheduler warns unless a method `step` was called before its own.
                optimizer.step = MethodType(lambda optimizer: None, optimizer)
                for group in optimizer.param_groups:  # a scheduler writes to the user's tensor
                    group.update({k: v.clone() for k, v in group.items() if isinstance(v, Tensor)})
                first = [dict(group) for group in optimizer.param_groups]
                done, schedulers[0] = 0, (optimizer, self._lr_scheduler(optimizer), first)
                optimizer.step()
            optimizer, scheduler, first = schedulers.pop(done)
            for _ in range(count - done):
                scheduler.step()
            schedulers[count] = optimizer, scheduler, first
            groups = zip(optimizer.param_groups, first, strict=True)
            return [{k: v for k, v in own.items() if k == "lr" or v is not old.get(k)} for own, old in groups]

    def step(
        self, form: Form, grads: Buckets, params: Buckets, state: TorchState, used: list[bool], is_trial: bool = False
    ) -> None:
        """Take one step of one worker, in place, with another optimizer; a trial is without the scheduler.

        Leaves that are not `used` have no gradient, and no state if they never had one; []: all are.
        """
        leaves, own = params.leaves(), each(torch.clone, grads) if form.writes_gradients else grads
        named = named_leaves(form.plan, leaves)
        options = self.options(int(state.count), named, form.plan) if form.scheduled and not is_trial else None
        for i, ((_, p), g) in enumerate(zip(named, own.leaves(), strict=True)):
            p.grad = g if not used or used[i] else None
        places = form.places(state)
        optimizer = self._restored(form, options, named, state, form.begun(places) if used else places)
        before, versions = [dict(group) for group in optimizer.param_groups], [version(g) for g in grads]
        with draws.torch_draws(int(state.count), -1):  # on all workers alike, so equal replicas stay equal
            optimizer.step()
        form.require_known(optimizer, before)
        rule = f"{type(optimizer).__name__} wrote over gradients, which {TRIALS} trial steps did not; clip in its step(), in a class of your own."
        require(versions == [version(g) for g in grads], CALL, rule)
        form.take(optimizer, named, leaves, state, places)

    def _restored(
        self, form: Form, options: list[dict[str, Any]] | None, named: Named, state: TorchState, places: Places
    ) -> Any:
        """Return another optimizer, whose state are views of this one; a scheduler's rates are written there."""
        optimizer = self.optimizer(named, form.plan)
        rated = [group for group in optimizer.param_groups if group.get("lr") is not None]
        for group, rate in zip(rated, state.rates, strict=True):
            lr, value = group["lr"], float(rate.learning_rate)
            group["lr"] = torch.full_like(lr, value) if isinstance(lr, Tensor) else value
        if int(state.count):
            form.give(optimizer, named, state, places)
        if options is not None:
            for group, own in zip(optimizer.param_groups, options, strict=True):
                group.update(own)
            for group, rate in zip(rated, state.rates, strict=True):
                assert isinstance(rate.count, Tensor)
                rate.learning_rate.fill_(float(group["lr"]))
                rate.count.copy_(state.count + 1)
        return optimizer

    def evaluated(self, params: Buckets, state: TorchState, back: bool) -> Buckets:
        """Return the parameters to evaluate, by the method eval of the optimizer; `back`: those to train, by its train."""
        plan = self.plan(params.plan.number())
        form = self.form(plan, plan.number(), params[0].device)
        state = form.structure.unflatten([x.clone() for x in trees.leaves(state)])
        new = Buckets([x.clone() for x in params], plan)
        named = named_leaves(plan, new.leaves())
        options = self.options(int(state.count), named, plan) if form.scheduled else None
        optimizer = self._restored(form, options, named, state, form.begun(form.places(state)))
        optimizer.eval()
        if back:
            for y, x in zip(new, params, strict=True):
                y.copy_(x)
            optimizer.train()
        return Buckets(new.tensors, params.plan)

    def state_type(self, plan: Plan) -> type[TorchState]:
        """Return the type of states of an optimizer with modes, for parameters of this plan: it knows the optimizer."""
        if plan.number() not in self._types:
            own = {"plan": plan, "evaluated": lambda state, x, back: self.evaluated(x, state, back)}
            self._types[plan.number()] = type("TorchState", (TorchState,), own)
        return self._types[plan.number()]


@constant_while_traced
def _plan_number(adapter: bytes, plan: int) -> int:
    return by_handle(adapter).plan(plan).number()


def _kernel(
    grads: list[Tensor], params: list[Tensor], state: list[Tensor], handle: Tensor, plan: int, workers: int
) -> None:
    rule = "its optimizer runs Python in every step, which a CUDA graph would not replay; leave mode out."
    require(context.inputs is None, 'compile(step, mode="reduce-overhead") with df.from_torch', rule)
    adapter, layout = by_handle(handle), by_handle(plan)
    with torch.no_grad():
        form = adapter.form(layout, plan, params[0].device)
        for i in range(workers) if workers else [...]:  # [...] is all of a tensor
            own = form.structure.unflatten([s[i] for s in state])
            g, x = ([b[i] for b in of] if workers else of for of in (grads, params))
            flags = zip(layout.buckets, g[len(x) :], strict=False)  # if any
            used = [s.numel > 0 and bool(its[s.start]) for bucket, its in flags for s in bucket.segments]
            adapter.step(form, Buckets(g[: len(x)], layout), Buckets(x, layout), own, used)


def _over_workers(info: Any, in_dims: Any, *arguments: Any) -> tuple[None, None]:
    *tensors, handle, plan, workers = arguments

    def first(tensors: list[Tensor], dims: list[int | None]) -> list[Tensor]:
        pairs = zip(tensors, dims, strict=True)
        return [x.expand(info.batch_size, *x.shape) if d is None else x.movedim(d, 0) for x, d in pairs]

    if workers:
        raise ValueError(
            "sweep(step, R): df.from_torch updates one worker after the other, so nothing is gained; use df.sgd, df.adamw or "
            "another optimizer of df.transforms, or train one run after the other."
        )
    rule = "under vmap, parameters and optimizer's state need a row for each worker, as df.stack(state, N) has."
    require(None not in (*in_dims[1], *in_dims[2]), "from_torch: update(grads, state, params)", rule)
    parts = [first(x, d) for x, d in zip(tensors, in_dims[:3], strict=True)]
    _step(*parts, handle, plan, info.batch_size)
    return None, None


_step = operator(
    # `grads`: and by element, if some leaves may have none, whether they have one. `workers`: 0 for one worker alone; N for N stacked ones.
    "torch_optimizer(Tensor[] grads, Tensor(a!)[] params, Tensor(b!)[] state, Tensor optimizer, int plan, int workers) -> ()",
    _kernel,
    lambda *arguments: None,
    _over_workers,
)
