"""Modules that write over their own weights and tensors, which self-supervised and adversarial training does."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.models.registry import Made, case, vectors
from tests.models.torch_cases import net, regression


class Momentum(nn.Module):
    """An encoder and its moving average, which is frozen."""

    def __init__(self):
        super().__init__()
        self.query, self.key = net(), net()
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", torch.randn(8, 2))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def move(self, key, query):
        key.mul_(0.9).add_(query, alpha=0.1)

    def forward(self, inputs, targets):
        with torch.no_grad():
            for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
                self.move(key, query)
            keys = self.key(targets)
        query = self.query(inputs)
        logits = torch.cat([(query * keys).sum(1, keepdim=True), query @ self.queue.clone().T], 1)
        with torch.no_grad():
            place = int(self.place)
            self.queue[place : place + 4] = keys
            self.place.fill_((place + 4) % 8)
        return F.cross_entropy(logits, torch.zeros(len(inputs), dtype=torch.long))


class MomentumByData(Momentum):
    def move(self, key, query):
        key.data = key.data * 0.9 + query.data * 0.1


def views(draw, step):
    inputs = torch.randn(4, 4, generator=draw)
    return inputs, inputs + 0.1 * torch.randn(4, 4, generator=draw)


@case("torch")
def momentum_encoder_in_place():
    return Made(Momentum(), views, forward=lambda module, batch: module(*batch), overwritten=("key",))


@case("torch")
def momentum_encoder_by_data():
    return Made(MomentumByData(), views, forward=lambda module, batch: module(*batch), overwritten=("key",))


@case("torch")
def weights_clipped_by_data():
    def loss(module, batch):
        module[0].weight.data.clamp_(-0.3, 0.3)
        return F.mse_loss(module(batch[0]), batch[1])

    return Made(net(), vectors(4, 2), forward=loss)


@case("torch")
def weights_normalized_by_data():
    def loss(module, batch):
        module[0].weight.data = F.normalize(module[0].weight.data)
        return F.mse_loss(module(batch[0]), batch[1])

    return Made(net(), vectors(4, 2), forward=loss)


@case("torch")
def backward_within_the_loss():
    def loss(module, batch):
        inputs, targets = batch
        F.mse_loss(module(inputs[:2]), targets[:2]).backward()
        return F.mse_loss(module(inputs[2:]), targets[2:])

    return Made(net(), vectors(4, 2), forward=loss)


@case("torch")
def adversarial_inputs():
    def loss(module, batch):
        inputs = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.mse_loss(module(inputs), batch[1]), inputs)
        return F.mse_loss(module((inputs + 0.1 * slope.sign()).detach()), batch[1])

    return Made(net(), vectors(4, 2), forward=loss)


@case("torch")
def reversed_gradients():
    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, slope):
            return -slope

    def loss(module, batch):
        hidden = module[1](module[0](batch[0]))
        return F.mse_loss(module[2](hidden), batch[1]) + 0.1 * Reversed.apply(hidden).square().mean()

    return Made(net(), vectors(4, 2), forward=loss)


@case("torch")
def counter_and_running_mean_as_attributes():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.calls, self.running = net(), 0, None

        def forward(self, inputs):
            self.calls += 1
            output = self.net(inputs)
            now = output.detach().mean()
            self.running = now if self.running is None else 0.9 * self.running + 0.1 * now
            return output - self.running / self.calls

    return regression(Counting())


@case("torch")
def mask_made_at_the_first_call():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.mask = net(), None

        def forward(self, inputs):
            if self.mask is None:
                self.mask = torch.linspace(0, 1, inputs.shape[1])
            return self.net(inputs * self.mask)

    return regression(Masked())


@case("torch")
def module_around_which_torch_compile_stands():
    return regression(torch.compile(net(), backend="aot_eager"))


@case("torch")
def symbolic_trace():
    return regression(torch.fx.symbolic_trace(net()))


@case("torch")
def exported_module():
    return regression(torch.export.export(net(), (torch.randn(4, 4),)).module())


@case("torch")
def fake_quantization():
    from torch.ao.quantization import FakeQuantize

    return regression(nn.Sequential(net(), FakeQuantize()))


@case("torch")
def nested_tensors():
    def loss(module, batch):
        rows = torch.nested.nested_tensor([batch[0][:1], batch[0][1:]], layout=torch.jagged)
        return F.mse_loss(module(rows).values(), batch[1])

    return Made(net(), vectors(4, 2), forward=loss)


@case("torch")
def gradients_of_each_example():
    def loss(module, batch):
        params = dict(module.named_parameters())

        def of_one(params, x, y):
            return F.mse_loss(torch.func.functional_call(module, params, x), y)

        slopes = torch.func.vmap(torch.func.grad(of_one), (None, 0, 0))(params, *batch)
        noise = sum(s.var(0).sum() for s in slopes.values())
        return F.mse_loss(module(batch[0]), batch[1]) + 0.1 * noise

    return Made(net(), vectors(4, 2), forward=loss)
