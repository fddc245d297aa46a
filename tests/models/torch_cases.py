"""Cases of PyTorch's own layers, hooks, parametrizations and modes."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, spectral_norm

from tests.models.registry import Made, case, vectors


def net(width=16, *more):
    return nn.Sequential(nn.Linear(4, width), *more, nn.Tanh(), nn.Linear(width, 2))


def regression(module):
    return Made(module, vectors(4, 2), F.mse_loss)


def bags(draw, step):
    return torch.randint(1, 13, (6,), generator=draw), torch.tensor([0, 2, 3]), torch.randn(3, 2, generator=draw)


@case("torch")
def weight_norm():
    module = net()
    parametrizations.weight_norm(module[0])
    return regression(module)


@case("torch")
def spectral_norm_parametrization():
    module = net()
    parametrizations.spectral_norm(module[0])
    return regression(module)


@case("torch")
def spectral_norm_by_hook():
    module = net()
    spectral_norm(module[0])
    return regression(module)


@case("torch")
def orthogonal():
    module = net(4)
    parametrizations.orthogonal(module[0])
    return regression(module)


@case("torch")
def pruned():
    module = net()
    prune.random_unstructured(module[0], "weight", 0.5)
    return regression(module)


@case("torch", tolerance=5e-2)
def autocast_to_bfloat16():
    def loss(module, batch):
        inputs, targets = batch
        with torch.autocast("cpu", torch.bfloat16):
            output = module(inputs)
        return F.mse_loss(output.float(), targets)

    return Made(net(), vectors(4, 2), forward=loss)


@case("torch", tolerance=5e-2)
def some_parameters_in_bfloat16():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2, dtype=torch.bfloat16)

        def forward(self, inputs):
            return self.last(self.first(inputs).tanh().bfloat16()).float()

    return regression(Mixed())


@case("torch", random=True)
def dropout():
    return regression(net(16, nn.Dropout(0.5)))


@case("torch", random=True)
def layers_dropped_at_random():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, inputs):
            for layer in self.layers:
                if torch.rand(()) > 0.5:
                    inputs = inputs + layer(inputs).tanh()
            return inputs[:, :2] + self.layers[0].bias[:2]

    return regression(Dropped())


class Words(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding, self.head = embedding, nn.Linear(4, 2)

    def forward(self, ids, *offsets):
        return self.head(self.embedding(ids, *offsets)).reshape(-1, 2)


def words(module):
    def batch(draw, step):
        return torch.randint(1, 13, (3,), generator=draw), torch.randn(3, 2, generator=draw)

    return Made(module, batch, F.mse_loss)


@case("torch")
def sparse_embedding():
    return words(Words(nn.Embedding(13, 4, sparse=True)))


@case("torch")
def embedding_that_renormalizes():
    return words(Words(nn.Embedding(13, 4, padding_idx=0, max_norm=1.0)))


@case("torch")
def embedding_bag():
    return Made(Words(nn.EmbeddingBag(13, 4)), bags, forward=lambda m, b: F.mse_loss(m(b[0], b[1]), b[2]))


@case("torch")
def sparse_embedding_bag():
    module = Words(nn.EmbeddingBag(13, 4, sparse=True, mode="sum"))
    return Made(module, bags, forward=lambda m, b: F.mse_loss(m(b[0], b[1]), b[2]))


@case("torch")
def gradient_penalty():
    def loss(module, batch):
        inputs = batch[0].clone().requires_grad_()
        output = module(inputs)
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        return F.mse_loss(output, batch[1]) + ((slope.norm(dim=1) - 1) ** 2).mean()

    return Made(net(), vectors(4, 2), forward=loss)


@case("torch")
def step_on_copies_in_the_loss():
    def loss(module, batch):
        params = dict(module.named_parameters())
        inner = F.mse_loss(torch.func.functional_call(module, params, batch[0]), batch[1])
        slopes = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        moved = {name: p - 0.1 * g for (name, p), g in zip(params.items(), slopes, strict=True)}
        return F.mse_loss(torch.func.functional_call(module, moved, batch[0].flip(0)), batch[1].flip(0))

    return Made(net(), vectors(4, 2), forward=loss)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, slope):
        (x,) = ctx.saved_tensors
        return slope * (x.abs() <= 1)


@case("torch")
def autograd_function_of_the_old_style():
    class Sign(nn.Module):
        def forward(self, x):
            return Straight.apply(x)

    return regression(nn.Sequential(nn.Linear(4, 16), Sign(), nn.Linear(16, 2)))


@case("torch")
def loss_that_prints():
    def loss(module, batch):
        value = F.mse_loss(module(batch[0]), batch[1])
        print("loss", value)
        return value

    return Made(net(), vectors(4, 2), forward=loss)


@case("torch")
def loss_that_looks_at_numbers():
    def loss(module, batch):
        value = F.mse_loss(module(batch[0]), batch[1])
        if not torch.isfinite(value):
            raise ValueError("the loss is not finite")
        return value * (2.0 if value.item() > 0.5 else 1.0), {"loss": value.item()}

    return Made(net(), vectors(4, 2), forward=loss)


@case("torch")
def loss_with_anomaly_detection():
    def loss(module, batch):
        with torch.autograd.detect_anomaly(check_nan=True):
            return F.mse_loss(module(batch[0]), batch[1])

    return Made(net(), vectors(4, 2), forward=loss)


@case("torch")
def compiled_submodule():
    module = net()
    module[0] = torch.compile(module[0], backend="aot_eager")
    return regression(module)


@case("torch")
def module_compiled_in_place():
    module = net()
    module.compile(backend="aot_eager")
    return regression(module)


@case("torch")
def scripted_submodule():
    module = net()
    module[1] = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
    return regression(module)


@case("torch")
def tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(13, 4), nn.Linear(4, 13, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids).tanh())

    def batch(draw, step):
        return torch.randint(13, (4,), generator=draw), torch.randint(13, (4,), generator=draw)

    return Made(Tied(), batch, F.cross_entropy)


@case("torch")
def batch_norm():
    return regression(net(16, nn.BatchNorm1d(16)))


@case("torch")
def codebook_kept_in_a_buffer():
    class Quantized(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)
            self.register_buffer("codes", torch.randn(5, 3))

        def forward(self, inputs):
            x = self.first(inputs)
            with torch.no_grad():
                nearest = torch.cdist(x, self.codes).argmin(1)
                self.codes.mul_(0.9).index_add_(0, nearest, 0.1 * x)
            return self.last(x + (self.codes[nearest] - x).detach())

    return regression(Quantized())


@case("torch")
def buffer_that_is_not_saved():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()
            self.register_buffer("shift", torch.linspace(-1, 1, 4), persistent=False)
            self.cache = {}

        def forward(self, inputs):
            if len(inputs) not in self.cache:
                self.cache[len(inputs)] = torch.arange(len(inputs))[:, None] / 10
            return self.net(inputs + self.shift + self.cache[len(inputs)])

    return regression(Positions())


@case("torch")
def double_precision():
    def batch(draw, step):
        return tuple(x.double() for x in vectors(4, 2)(draw, step))

    return Made(net().double(), batch, F.mse_loss)


@case("torch")
def complex_parameters():
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64) / math.sqrt(3))
            self.head = nn.Linear(4, 2)

        def forward(self, inputs):
            return self.head(torch.fft.irfft(torch.fft.rfft(inputs) * self.weight, n=4))

    return regression(Spectral())


@case("torch")
def forward_hooks():
    module = net()
    module[0].register_forward_hook(lambda layer, inputs, output: output * 1.5)
    module[2].register_forward_pre_hook(lambda layer, inputs: (inputs[0] + 0.1,))
    module[1].register_full_backward_hook(lambda layer, slopes, above: (slopes[0] * 0.5,))
    return regression(module)


@case("torch")
def tensor_hook():
    def loss(module, batch):
        hidden = module[0](batch[0])
        hidden.register_hook(lambda slope: slope.clamp(-0.1, 0.1))
        return F.mse_loss(module[2](module[1](hidden)), batch[1])

    return Made(net(), vectors(4, 2), forward=loss)


@case("torch")
def boolean_mask():
    def batch(draw, step):
        inputs, targets = vectors(4, 2, 8)(draw, step)
        return inputs, targets, torch.rand(8, generator=draw) > 0.4

    def criterion(output, targets, there):
        return ((output[there] - targets[there]) ** 2).mean()

    return Made(net(), batch, criterion)


@case("torch")
def frozen_layer():
    module = net()
    module[0].requires_grad_(False)
    return regression(module)
