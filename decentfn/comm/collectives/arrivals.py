"""Operators of workers that wait for nobody: take the mail that has arrived, and offer shares of the own mass.

Arrivals are data, as peers are. On a rank its mailbox says what is there. Under `vmap` a replay says it
(`context.arrivals`), and the messages of a worker are in a ring of its state; without a replay all workers step at once,
and each message is taken in the next step. As an operator of all workers (`workers` of them), both work compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decentfn.comm.collectives.lookup import refuse_size
from decentfn.comm.collectives.mailbox import Mailbox, with_mail
from decentfn.comm.collectives.membership import world
from decentfn.core import by_handle, context, number_on, of_step, operator, require, trees
from decentfn.core.buckets import wide
from decentfn.timing.trace import LEAST_MASS, Offered, filled_up, shares_of
from decentfn.topologies import Topology


class Ring(NamedTuple):
    """A worker's messages in flight in the simulator, R places of K slots; on ranks R = 0, as the mailbox has them."""

    values: tuple[Tensor, ...]  # [R, D] each, in the dtype of the message
    shares: Tensor  # [R, K] float64, the mass that goes with them in each slot
    to: Tensor  # [R, K] int64, the receiver; -1: none

    def with_room(self, places: int) -> Ring:
        """Return an empty ring of R = `places`, or one for each worker `[N, ...]`."""
        values = tuple(self._empty(x, places, 0.0) for x in self.values)
        return Ring(values, self._empty(self.shares, places, 0.0), self._empty(self.to, places, -1))

    @staticmethod
    def _empty(x: Tensor, places: int, value: float) -> Tensor:
        return x.new_full((*x.shape[:-2], places, x.shape[-1]), value)


def with_room(state: Any, places: int) -> Any:
    """Return the state with room for so many messages in flight of each worker, and none of them."""
    return trees.map_nodes(Ring, lambda ring: ring.with_room(places), state)


def take(own: Sequence[Tensor], ring: Ring, topology: Topology, t: Tensor, late: bool) -> list[Tensor]:
    """Return the parameters, `[D]` each, and last their weight, 0-d float64, with the mail of own step `t`.

    First what has arrived before the step; then, late, what has arrived since, of steps that had ended before.
    """
    return _take(list(own), list(ring.values), ring.shares, ring.to, topology.handle, t, late, 0)


def offer(values: Sequence[Tensor], mass: Tensor, ring: Ring, topology: Topology, t: Tensor) -> tuple[Tensor, Ring]:
    """Offer `values` with shares of `mass`, 0-d float64, in each slot of own step `t`'s round.

    What has no receiver, would wait for the last message to arrive, or would leave less than `LEAST_MASS`, stays.
    Returns the mass that went out, 0-d float64, and the ring with the message.
    """
    slots = topology.slots
    told = _offer(list(values), mass, topology.handle, t, slots, 0)
    given, to, place = told[:slots], told[slots:-1].to(torch.int64), told[-1]
    is_here = torch.arange(ring.to.shape[0], device=place.device) == place
    boxes = [torch.where(is_here[:, None], x, old) for x, old in zip(values, ring.values, strict=True)]
    shares = torch.where(is_here[:, None], given, ring.shares)
    return sum(given.unbind(), torch.zeros_like(mass)), Ring(
        tuple(boxes), shares, torch.where(is_here[:, None], to, ring.to)
    )


def _mailbox(handle: Tensor, workers: int, what: str) -> tuple[Mailbox | None, Topology]:
    rule = "their mail is sorted by the host, and a replayed graph would take the first step's again; compile without a mode."
    require(context.inputs is None, 'compile(step, mode="reduce-overhead") of workers on their own clocks', rule)
    here, topology = context.step_world or world(), by_handle(handle)
    if (workers or 1) * here.identity.size != topology.num_workers or workers and here.identity.size > 1:
        refuse_size(here, workers or 1, topology.num_workers, "step(state, batch, t)")
    if here.identity.size == 1:
        return None, topology
    if here.mailbox is None or here.mailbox.topology is not topology:
        raise RuntimeError(
            f"{what}: this algorithm has no mailbox here; call its init(params) on every rank, and no other asynchronous algorithm's "
            "after it."
        )
    here.session.is_own_step = True
    return here.mailbox, topology


# -- take -----------------------------------------------------------------------------------------------------------


def _take_kernel(
    own: list[Tensor], values: list[Tensor], shares: Tensor, to: Tensor, handle: Any, t: Any, late: bool, workers: int
) -> list[Tensor]:
    box, _ = _mailbox(handle, workers, "take")
    if workers:
        at_once = to[..., :0] if late else to  # all steps end at once, so nothing arrives during one
        rows = addressed(at_once) if context.arrivals is None else context.arrivals.arriving(int(t), late, to)
        return with_rows(own, values, shares, rows)
    return with_mail(own, (), shares) if box is None else box.take(int(t), own, late=late)


def with_rows(own: Sequence[Tensor], values: Sequence[Tensor], shares: Tensor, rows: Tensor) -> list[Tensor]:
    """Return `with_mail` of all workers, from their rings `[N, R, D]`, `[N, R, K]`; rows as in `timing.trace.rows_of`."""
    rows, mass = rows.to(shares.device), torch.zeros_like(own[-1])
    sums = [torch.zeros_like(x, dtype=wide(x.dtype)) for x in own[:-1]] if rows.shape[1] else []
    for number in rows.unbind(1):
        is_there, number = number >= 0, number.clamp(min=0)
        share = shares.reshape(-1)[number] * is_there
        for i, x in enumerate(values):
            message = x.flatten(0, 1).index_select(0, number // max(1, shares.shape[-1]))
            away = message.to(sums[i].dtype) - own[i]
            sums[i] += torch.where(is_there[:, None], share[:, None].to(away.dtype) * away, 0.0)
        mass += share
    *z, w = with_mail(own, sums, mass)
    has_mail = (rows >= 0).any(1)[:, None]  # without it -0.0 stays, as on ranks
    return [*(torch.where(has_mail, x, old) for x, old in zip(z, own, strict=False)), w]


def addressed(to: Tensor) -> Tensor:
    """Return the numbers of all messages in the rings for each worker, `[N, M]`, ascending."""
    receivers = to.flatten().tolist()
    found: list[list[int]] = [[] for _ in range(len(to))]
    for number, receiver in enumerate(receivers):
        if receiver >= 0:
            found[receiver].append(number)
    return filled_up(found)


_take = operator(
    "take(Tensor[] own, Tensor[] values, Tensor shares, Tensor to, Tensor topology, Tensor t, "
    "bool late, int workers) -> Tensor[]",
    _take_kernel,
    lambda own, *_: [torch.empty_like(x) for x in own],
    ("own", "values", "shares", "to"),
)


# -- offer ----------------------------------------------------------------------------------------------------------


def _offer_kernel(values: list[Tensor], mass: Tensor, handle: Tensor, t: Tensor, slots: int, workers: int) -> Tensor:
    box, topology = _mailbox(handle, workers, "offer")
    if workers:
        told = _at_once(topology, int(t), mass) if context.arrivals is None else context.arrivals.offered(int(t))
        given = told.given.to(mass.device) * mass[:, None]
        return torch.cat([given, told.to.to(given), told.place[:, None].to(given)], dim=1)
    told = mass.new_zeros(2 * slots + 1)
    if box is not None:
        own = float(mass)
        shares = [share * own for share in shares_of(topology, int(t))[box.rank].tolist()]
        told[:slots] = torch.tensor(box.offer(int(t), values, shares, own), dtype=told.dtype)
    return told


def _at_once(topology: Topology, t: int, mass: Tensor) -> Offered:
    """Return what goes out if all workers take step `t` at once, and each message arrives before the next."""
    given, to = shares_of(topology, t).clone(), topology.round(t).destinations.clone()
    stays = mass.cpu()
    for slot in range(topology.slots):
        share = given[:, slot] * mass.cpu()
        goes = (to[:, slot] >= 0) & (stays - share >= LEAST_MASS)
        stays = torch.where(goes, stays - share, stays)
        given[:, slot] *= goes
        to[:, slot].masked_fill_(~goes, -1)
    return Offered(given, to, torch.zeros(len(to), dtype=torch.int64))


_offer = operator(
    # K shares that went out, K receivers (ranks: 0, unused), and the place in the ring.
    "offer(Tensor[] values, Tensor mass, Tensor topology, Tensor t, int slots, int workers) -> Tensor",
    _offer_kernel,
    lambda values, mass, handle, t, slots, workers: mass.new_empty((*mass.shape, 2 * slots + 1)),
    ("values", "mass"),
)


def _own_step_kernel(token: Tensor, t: Tensor, workers: int) -> Tensor:
    if not workers or context.arrivals is None:
        return of_step(number_on, t, token.device).repeat((workers,) if workers else ())
    return context.arrivals.steps(int(t)).to(token.device)


own_step = operator(
    "own_step(Tensor token, Tensor t, int workers) -> Tensor",
    _own_step_kernel,
    lambda token, t, workers: token.new_empty((workers,) if workers else (), dtype=torch.int64),
    ("token",),
)
"""Operator `(token, t, 0)` -> a worker's own step in step t, 0-d int64; `(token, t, N)`: of all, `[N]`, -1 for none."""
