"""Compressors: `(compress, decompress)` pairs that turn a bucket into a message of a fixed number of bytes and back.

A message is one uint8 vector that holds all there is to say (values, places, scales), packed to the bit, so that one
exchange carries it and what is sent is what was planned: `nbytes`. Nothing is entropy-coded. Random ones draw from
`noise`, a function of (seed, t, worker, bucket); what the receiver needs of the draw travels in the message.

C is a δ-contraction if E‖x - C(x)‖² <= (1 - δ) ‖x‖², 0 < δ <= 1: what CHOCO-SGD, DeepSqueeze and error feedback need.
C is unbiased if E C(x) = x.
"""

from decentfn.compressors.compressor import Compressor, Key
from decentfn.compressors.rounded import cast, identity, qsgd, quantize, sign
from decentfn.compressors.shaped import dct_top_k, low_rank
from decentfn.compressors.sparse import random_k, top_k

__all__ = [
    "Compressor",
    "Key",
    "cast",
    "dct_top_k",
    "identity",
    "low_rank",
    "qsgd",
    "quantize",
    "random_k",
    "sign",
    "top_k",
]
