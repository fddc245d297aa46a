"""Compressors: `(compress, decompress)` pairs that turn a bucket into a message of a fixed number of bytes and back.

A message is one uint8 vector with all values, places and scales, packed to the bit. One exchange carries it, and its
size is planned: `nbytes`. There is no entropy coding. Random compressors draw by (seed, t, worker, bucket); the message
contains what the receiver needs of the draw.

C is a δ-contraction if E‖x - C(x)‖² <= (1 - δ) ‖x‖², 0 < δ <= 1; CHOCO-SGD, DeepSqueeze and error feedback need one.
C is unbiased if E C(x) = x.
"""

from decentfn.compressors.compressor import Compressor, Key
from decentfn.compressors.rounded import cast, identity, qsgd, quantize, sign
from decentfn.compressors.shaped import dct_top_k, low_rank
from decentfn.compressors.sparse import chunk_top_k, random_k, top_k

__all__ = [
    "Compressor",
    "Key",
    "cast",
    "chunk_top_k",
    "dct_top_k",
    "identity",
    "low_rank",
    "qsgd",
    "quantize",
    "random_k",
    "sign",
    "top_k",
]
