"""Nothing in a step reads from the device, copies to it, or computes elsewhere: every algorithm, counted on meta."""

from dataclasses import replace

import pytest
import torch

import decentfn as df
from decentfn.comm import collectives
from decentfn.core import buckets, trees
from decentfn.core.scalars import sent
from decentfn.gradient import side_channel
from decentfn.gradient.backward import Layout, backward
from decentfn.testing import problem
from tests import contract, devices

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("row", contract.ROWS)
def test_a_step_reads_nothing_back_and_copies_nothing(row):
    """Also within the operators, where a new round's table is sent once, from pinned memory."""
    for simulated in (False, True):
        if simulated and row.startswith("asynchronous"):
            continue  # what arrives is decided on the host
        first, again, new = devices.copies(contract.ROWS[row], simulated=simulated)
        assert {leaf.device.type for leaf in trees.leaves(new)} == {"meta"}
        assert not any(copy.waits for copy in first) and again == []


@pytest.mark.one_in(6)
@pytest.mark.parametrize("row", contract.ROWS)
def test_a_traced_step_computes_nothing_on_another_device(row):
    """For periodic and random schedules. On a GPU each such operation would need C++ compilation and a copy."""
    subject = contract.ROWS[row]
    random = replace(subject, topology=lambda n: df.topology("random-matching", n))
    for simulated in (False, True):
        assert devices.on_the_cpu(subject, simulated=simulated) == []
        try:
            random.build()
        except ValueError:  # it needs a static graph
            continue
        assert devices.on_the_cpu(random, simulated=simulated) == []


@pytest.mark.parametrize(
    "name",
    [
        "adafactor",
        "adagrad",
        "adam",
        "adamw",
        "lamb",
        "lion",
        "nadam",
        "radam",
        "rmsprop",
        "schedule_free_adamw",
        "sgd",
    ],
)
def test_an_optimizer_computes_nothing_on_another_device(name):
    """Simulated, its count is a vector of all workers: vmap casts a Python number beside one on the CPU, where the dtypes differ."""
    optimizer = getattr(df.transforms, name)(df.schedules.warmup_cosine(0.1, 10, 100))
    assert devices.on_the_cpu(contract.ROWS["all_reduce"], simulated=True, optimizer=optimizer) == []


def test_the_gradient_by_autograd_waits_for_nothing_and_copies_nothing():
    params = trees.map(devices.on_meta, buckets.flatten(problem.params(0)))
    batch = trees.map(devices.on_meta, problem.batch(0, 0))
    form = Layout(params.plan, None, frozenset())
    form.is_tried = True
    known = problem.loss_fn, form, False, 3, collectives.world(), 0, None, list(params), []
    with devices.Copies() as copies:
        _, one = side_channel.with_side_channel(
            lambda *_: (None, backward(*known, batch)), None, batch, torch.tensor(0)
        )
    assert copies.seen == [] and {g.device.type for g in [*one.grads, one.loss]} == {"meta"}


def weighed_by_group(grads, state, params, mix):
    share = 1.0 if mix.mean_weight is None else mix.mean_weight  # None: one worker alone
    return df.kit.each(lambda g: -0.1 * (g * share).to(g.dtype), grads), state


@pytest.mark.parametrize(
    "options",
    [
        {"guarded": True},
        {"loss_fn": df.dynamic_loss_scale(problem.loss_fn, agree=True)},
        {"optimizer": df.transforms.MixAware(lambda params: (), weighed_by_group)},
        {"optimizer": df.sgd(lambda count: 0.1)},
    ],
)
def test_what_is_around_a_step_reads_nothing_back_and_copies_nothing(options):
    """A guard, which looks at its count only once in `limit` steps on a GPU, a loss scale, an optimizer that asks for the weight of its
    group, and a rate that is a Python number."""
    subject = replace(contract.ROWS["adapt_while_communicate"], topology=contract.on("complete"))
    for simulated in (False, True):
        first, again, _ = devices.copies(subject, simulated=simulated, **options)
        assert not any(copy.waits for copy in first) and again == []


def test_what_a_kernel_sends_comes_from_pinned_memory():
    with devices.Copies() as copies:
        sent(torch.tensor([True, False]), torch.device("meta"))
    assert copies.seen == [devices.Copy(2, False)]


def test_what_waits_and_what_copies_is_seen():
    with devices.Copies() as copies:
        torch.ones(3).to("meta")
        torch.empty(3, device="meta").copy_(torch.ones(3))
        torch.tensor(1.0, device="meta")
    assert copies.seen == [devices.Copy(3, True)] * 2 + [devices.Copy(1, True)]
    with pytest.raises(RuntimeError):
        torch.ones(1, device="meta").item()
