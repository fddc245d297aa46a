"""Wrappers around any algorithm: guard, EMA, averaged buffers, mixed optimizer state."""

from decentfn.wrappers.averaged_buffers import average_buffers
from decentfn.wrappers.guarding import guard
from decentfn.wrappers.mixed_state import mix_state
from decentfn.wrappers.moving_average import ema, ema_params, ema_state

__all__ = ["average_buffers", "ema", "ema_params", "ema_state", "guard", "mix_state"]
