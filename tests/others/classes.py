"""Classes of batches that decorators of other packages make."""

from tensordict import tensorclass
from torch import Tensor


@tensorclass
class Sample:
    """Inputs and targets."""

    x: Tensor
    y: Tensor
