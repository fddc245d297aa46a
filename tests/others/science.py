"""Networks and losses of other packages, small and with random weights: equations, processes, groups, densities."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tests.models.registry import Made, vectors
from tests.others.harness import model


def points(draw: Generator, step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 3, generator=draw)
    return x, torch.sin(x.sum(1))


def output(module: nn.Module, batch: Any) -> Any:
    """The module's output, which is the loss."""
    return module(batch[0])


# -- equations, processes, groups -------------------------------------------------------------------------------------


@model("torchdiffeq", "`odeint`, adaptive `dopri5`")
def adaptive_solver() -> Made:
    from torchdiffeq import odeint

    def forward(net: nn.Module, batch: Any) -> Tensor:
        return odeint(lambda t, y: net(y), batch[0], torch.tensor([0.0, 0.5, 1.0]))[-1].square().mean()

    return Made(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)), points, forward=forward)


@model("torchdiffeq", "`odeint_adjoint`, `rk4`")
def adjoint_solver() -> Made:
    from torchdiffeq import odeint_adjoint

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return self.net(y)

    def forward(net: nn.Module, batch: Any) -> Tensor:
        return odeint_adjoint(net, batch[0], torch.linspace(0, 1, 4), method="rk4")[-1].square().mean()

    return Made(Field(), points, forward=forward)


@model("torchsde", "`sdeint`, Ito, `euler`", random=True)
def stochastic_solver() -> Made:
    import torchsde

    class Equation(nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def __init__(self) -> None:
            super().__init__()
            self.drift, self.diffusion = nn.Linear(3, 3), nn.Linear(3, 3)

        def f(self, t: Tensor, y: Tensor) -> Tensor:
            return self.drift(y)

        def g(self, t: Tensor, y: Tensor) -> Tensor:
            return self.diffusion(y).sigmoid()

    def forward(net: nn.Module, batch: Any) -> Tensor:
        noise = torchsde.BrownianInterval(0.0, 1.0, size=(8, 3), entropy=0)
        return (
            torchsde.sdeint(net, batch[0], torch.tensor([0.0, 1.0]), bm=noise, dt=0.25, method="euler").square().mean()
        )

    return Made(Equation(), points, forward=forward)


@model("torchcde", "cubic Hermite splines and `cdeint`")
def controlled_solver() -> Made:
    import torchcde

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4 * 2)

        def forward(self, t: Tensor, z: Tensor) -> Tensor:
            return self.linear(z).tanh().view(*z.shape[:-1], 4, 2)

    def forward(net: nn.Module, batch: Any) -> Tensor:
        path = torchcde.CubicSpline(torchcde.hermite_cubic_coefficients_with_backward_differences(batch))
        start = torch.zeros(3, 4)
        return (
            torchcde.cdeint(X=path, func=net, z0=start, t=path.interval, method="rk4", adjoint=False)[:, -1]
            .square()
            .mean()
        )

    def batch(draw: Generator, step: int) -> Tensor:
        return torch.randn(3, 6, 2, generator=draw).cumsum(1)

    return Made(Field(), batch, forward=forward)


@model("gpytorch", "exact marginal likelihood")
def exact_process() -> Made:
    import gpytorch

    class Process(gpytorch.models.ExactGP):
        def __init__(self, likelihood: Any) -> None:
            super().__init__(None, None, likelihood)
            self.mean, self.kernel = (
                gpytorch.means.ConstantMean(),
                gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()),
            )

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    def forward(net: nn.Module, batch: Any) -> Tensor:
        return -net.likelihood(net.forward(batch[0])).log_prob(batch[1]) / 8

    return Made(Process(gpytorch.likelihoods.GaussianLikelihood()), points, forward=forward)


@model("gpytorch", "variational, inducing points", special="`num_data` of the ELBO counts all workers' samples")
def variational_process() -> Made:
    import gpytorch

    class Process(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            inducing = torch.randn(4, 3)
            over = gpytorch.variational.CholeskyVariationalDistribution(4)
            super().__init__(gpytorch.variational.VariationalStrategy(self, inducing, over))
            self.mean, self.kernel = gpytorch.means.ConstantMean(), gpytorch.kernels.RBFKernel()
            self.likelihood = gpytorch.likelihoods.GaussianLikelihood()

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    def forward(net: Any, batch: Any) -> Tensor:
        return -gpytorch.mlls.VariationalELBO(net.likelihood, net, num_data=64)(net(batch[0]), batch[1])

    net = Process()
    net(torch.randn(8, 3))  # the first call initializes the variational distribution
    return Made(net, points, forward=forward)


@model("botorch", "`SingleTaskGP` and its marginal likelihood, fixed data")
def single_task() -> Made:
    from botorch.models import SingleTaskGP
    from gpytorch.mlls import ExactMarginalLogLikelihood

    x = torch.rand(8, 2, generator=Generator().manual_seed(0), dtype=torch.float64)

    def forward(net: Any, batch: Any) -> Tensor:
        return -ExactMarginalLogLikelihood(net.likelihood, net)(net(*net.train_inputs), net.train_targets) / 1000

    def batch(draw: Generator, step: int) -> Tensor:
        return torch.zeros(1)

    return Made(SingleTaskGP(x, x.sin().sum(1, keepdim=True)), batch, forward=forward)


@model("e3nn", "equivariant tensor product")
def equivariant() -> Made:
    from e3nn import o3

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = o3.FullyConnectedTensorProduct("4x0e + 2x1o", "1x0e + 1x1o", "4x0e")
            self.linear = o3.Linear("4x0e", "1x0e")

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.product(x[:, :10], x[:, 10:])).square().mean()

    return Made(Net(), vectors(14, 1), forward=output)


@model("pypose", "a rotation as a parameter")
def rotation() -> Made:
    import pypose as pp

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pose = pp.Parameter(pp.randn_SO3(1))

        def forward(self, x: Tensor) -> Tensor:
            return (self.pose.Act(x) - x.roll(1, -1)).square().mean()

    return Made(Net(), points, forward=output)


@model("geoopt", "`ManifoldParameter` on the Poincaré ball")
def hyperbolic() -> Made:
    import geoopt

    ball = geoopt.PoincareBall()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.points = geoopt.ManifoldParameter(ball.expmap0(torch.randn(5, 3) * 0.1), manifold=ball)

        def forward(self, x: Tensor) -> Tensor:
            return ball.dist(self.points[:, None], ball.expmap0(x * 0.1)).mean()

    return Made(Net(), points, forward=output)


@model("pennylane", "`TorchLayer` of two qubits")
def quantum() -> Made:
    import pennylane as qml

    device = qml.device("default.qubit", wires=2)

    @qml.qnode(device, interface="torch", diff_method="backprop")
    def circuit(inputs: Any, weights: Any) -> Any:
        qml.AngleEmbedding(inputs, wires=range(2))
        qml.BasicEntanglerLayers(weights, wires=range(2))
        return [qml.expval(qml.PauliZ(wires=i)) for i in range(2)]

    net = nn.Sequential(nn.Linear(3, 2), qml.qnn.TorchLayer(circuit, {"weights": (2, 2)}), nn.Linear(2, 1))
    return Made(net, vectors(3, 1), F.mse_loss)


# -- densities --------------------------------------------------------------------------------------------------------


@model("zuko", "neural spline flow")
def spline_flow() -> Made:
    import zuko

    return Made(
        zuko.flows.NSF(3, transforms=2, hidden_features=(8,)), points, forward=lambda f, b: -f().log_prob(b[0]).mean()
    )


@model("normflows", "RealNVP")
def real_nvp() -> Made:
    import normflows as nf

    layers = []
    for _ in range(2):
        layers += [nf.flows.AffineCouplingBlock(nf.nets.MLP([2, 8, 4])), nf.flows.Permute(4, mode="swap")]
    flow = nf.NormalizingFlow(nf.distributions.base.DiagGaussian(4), layers)
    return Made(flow, vectors(4, 1), forward=lambda f, b: f.forward_kld(b[0]))


@model("nflows", "masked autoregressive flow")
def autoregressive_flow() -> Made:
    from nflows.distributions.normal import StandardNormal
    from nflows.flows.base import Flow
    from nflows.transforms.autoregressive import MaskedAffineAutoregressiveTransform

    flow = Flow(MaskedAffineAutoregressiveTransform(features=3, hidden_features=8), StandardNormal([3]))
    return Made(flow, points, forward=lambda f, b: -f.log_prob(b[0]).mean())


@model("pyro-ppl", "`PyroModule` and `Trace_ELBO.differentiable_loss`", random=True, special="leave `pyro.param` out: a module's parameters")  # fmt: skip
def variational_inference() -> Made:
    import pyro
    import pyro.distributions as dist
    from pyro.infer import Trace_ELBO

    class Guide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.log_scale = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

        def guide(self, x: Tensor) -> None:
            pyro.sample("w", dist.Normal(self.mean, self.log_scale.exp()).to_event(1))

        def model(self, x: Tensor) -> None:
            w = pyro.sample("w", dist.Normal(torch.zeros(3), torch.ones(3)).to_event(1))
            pyro.sample("y", dist.Normal(x @ w, 1.0).to_event(1), obs=torch.sin(x.sum(1)))

    def forward(net: Any, batch: Any) -> Tensor:
        return Trace_ELBO().differentiable_loss(net.model, net.guide, batch[0])

    return Made(Guide(), points, forward=forward)
