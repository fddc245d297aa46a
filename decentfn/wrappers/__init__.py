"""What works around any algorithm."""

from decentfn.wrappers.moving_average import ema, ema_params, ema_state

__all__ = ["ema", "ema_params", "ema_state"]
