"""Networks and losses of other packages, small and with random weights."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tests.models.registry import Made, images, vectors
from tests.others.harness import model
from tests.others.science import output, points

# -- images -----------------------------------------------------------------------------------------------------------


def convolution(classes: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes))


@model("kornia", "`RandomAffine` in the loss", random=True)
def augmented() -> Made:
    import kornia.augmentation as K

    affine = K.RandomAffine(20.0, p=1.0)

    def forward(net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(affine(batch[0])), batch[1])

    return Made(convolution(), images(12), forward=forward)


def masks(draw: Generator, step: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 1, 32, 32, generator=draw), torch.randint(2, (2, 1, 32, 32), generator=draw)


@model("monai", "`UNet` and `DiceCELoss`")
def medical() -> Made:
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet

    net = UNet(spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,), norm="batch")
    return Made(net, masks, DiceCELoss(to_onehot_y=True, softmax=True))


@model("segmentation-models-pytorch", "`Unet(resnet18)` and `DiceLoss`")
def segmentation() -> Made:
    import segmentation_models_pytorch as smp

    net = smp.Unet(
        "resnet18", encoder_weights=None, in_channels=1, classes=1, encoder_depth=3, decoder_channels=(8, 8, 4)
    )
    return Made(net, masks, smp.losses.DiceLoss("binary"), )  # fmt: skip


@model("diffusers", "`UNet2DModel`, noise of `DDPMScheduler`")
def diffusion() -> Made:
    from diffusers import DDPMScheduler, UNet2DModel

    net = UNet2DModel(sample_size=8, in_channels=1, out_channels=1, block_out_channels=(8, 8), layers_per_block=1,
                      norm_num_groups=4, down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"))  # fmt: skip
    schedule = DDPMScheduler(num_train_timesteps=10)

    def forward(net: Any, batch: Any) -> Tensor:
        clean, noise, t = batch
        return F.mse_loss(net(schedule.add_noise(clean, noise, t), t).sample, noise)

    def batch(draw: Generator, step: int) -> tuple[Tensor, ...]:
        clean, noise = torch.randn(2, 2, 1, 8, 8, generator=draw)
        return clean, noise, torch.randint(10, (2,), generator=draw)

    return Made(net, batch, forward=forward)


@model("open_clip_torch", "two towers and `ClipLoss`", tolerance=1e-3)
def two_towers() -> Made:
    from open_clip.loss import ClipLoss
    from open_clip.model import CLIP

    net = CLIP(16, {"image_size": 16, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8},
               {"context_length": 6, "vocab_size": 20, "width": 16, "heads": 2, "layers": 1})  # fmt: skip
    loss = ClipLoss()
    for p in net.parameters():
        nn.init.normal_(p, std=0.1)

    def batch(draw: Generator, step: int) -> tuple[Tensor, Tensor]:
        return torch.randn(3, 3, 16, 16, generator=draw), torch.randint(20, (3, 6), generator=draw)

    return Made(net, batch, forward=lambda net, b: loss(*net(*b)))


@model("lightly", "`NTXentLoss` of two views")
def contrastive() -> Made:
    from lightly.loss import NTXentLoss

    loss = NTXentLoss()

    def batch(draw: Generator, step: int) -> Tensor:
        return torch.randn(2, 4, 3, 12, 12, generator=draw)

    return Made(convolution(8), batch, forward=lambda net, b: loss(net(b[0]), net(b[1])))


@model(
    "pytorch-metric-learning",
    "`ArcFaceLoss`, a criterion with weights",
    special="a module that holds network and criterion",
)
def metric_learning() -> Made:
    from pytorch_metric_learning.losses import ArcFaceLoss

    net = nn.ModuleDict({"net": convolution(8), "loss": ArcFaceLoss(4, 8)})
    return Made(net, images(12), forward=lambda m, b: m["loss"](m["net"](b[0]), b[1]))


@model("pytorch-metric-learning", "`TripletMarginLoss` with a miner")
def triplets() -> Made:
    from pytorch_metric_learning import losses, miners

    loss, miner = losses.TripletMarginLoss(), miners.MultiSimilarityMiner()

    def forward(net: nn.Module, batch: Any) -> Tensor:
        points = net(batch[0])
        return loss(points, batch[1], miner(points, batch[1]))

    return Made(convolution(8), images(12, classes=2, count=8), forward=forward)


@model("torchvision", "EfficientNet with stochastic depth", random=True, tolerance=1e-3)
def stochastic_depth() -> Made:
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    net = EfficientNet([MBConvConfig(1, 3, 1, 8, 8, 2)], dropout=0.1, stochastic_depth_prob=0.5, num_classes=4)
    return Made(net, images(16), F.cross_entropy)


@model("timm", "`LayerScale` ViT with drop path", random=True)
def drop_path() -> Made:
    vit = importlib.import_module("timm.models.vision_transformer").VisionTransformer
    net = vit(
        img_size=16,
        patch_size=8,
        embed_dim=16,
        depth=2,
        num_heads=2,
        num_classes=4,
        drop_path_rate=0.3,
        init_values=0.1,
    )
    return Made(net, images(16), F.cross_entropy)


# -- others -----------------------------------------------------------------------------------------------------------


def quantized(kind: str, **options: Any) -> Made:
    package = importlib.import_module("vector_quantize_pytorch")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.quantize, self.decode = (
                nn.Linear(6, 4),
                getattr(package, kind)(**options),
                nn.Linear(4, 6),
            )

        def forward(self, x: Tensor) -> Tensor:
            codes, _, *more = self.quantize(self.encode(x)[:, None])
            return F.mse_loss(self.decode(codes[:, 0]), x) + (more[0].sum() if more else 0.0)

    return Made(Net(), vectors(6, 1), forward=output)


@model("vector-quantize-pytorch", "`VectorQuantize`, codebook by moving average")
def codebook() -> Made:
    return quantized("VectorQuantize", dim=4, codebook_size=8, threshold_ema_dead_code=0)


@model("vector-quantize-pytorch", "`FSQ`")
def finite_scalars() -> Made:
    return quantized("FSQ", levels=[3, 3], dim=4)


def spiking() -> nn.Module:
    snn = importlib.import_module("snntorch")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.leaky = nn.Linear(3, 4), snn.Leaky(beta=0.9)

        def forward(self, x: Tensor) -> Tensor:
            membrane, total = self.leaky.init_leaky(), 0.0
            for _ in range(4):
                spikes, membrane = self.leaky(self.linear(x), membrane)
                total = total + membrane.square().mean()
            return total

    return Net()


@model("snntorch", "a leaky layer over time")
def spiking_at_once() -> Made:
    return Made(spiking(), points, forward=output)


@model(
    "snntorch",
    "a leaky layer over time, called before",
    special="call the module once before `df.functional`: its buffers get their shapes",
)
def spiking_called_before() -> Made:
    net = spiking()
    net(torch.zeros(8, 3))
    return Made(net, points, forward=output)


@model("spikingjelly", "neurons that keep their membranes", special="`reset_net` in the loss")
def membranes() -> Made:
    from spikingjelly.activation_based import functional, neuron

    net = nn.Sequential(nn.Linear(3, 8), neuron.LIFNode(), nn.Linear(8, 1))

    def forward(net: nn.Module, batch: Any) -> Tensor:
        functional.reset_net(net)
        return torch.stack([net(batch[0] * 3).square().mean() for _ in range(3)]).mean()

    return Made(net, points, forward=forward)


@model("pytorch-crf", "conditional random field")
def random_field() -> Made:
    from torchcrf import CRF

    net = nn.ModuleDict({"net": nn.Linear(3, 4), "crf": CRF(4, batch_first=True)})

    def batch(draw: Generator, step: int) -> tuple[Tensor, Tensor]:
        return torch.randn(2, 5, 3, generator=draw), torch.randint(4, (2, 5), generator=draw)

    return Made(net, batch, forward=lambda m, b: -m["crf"](m["net"](b[0]), b[1], reduction="mean"))


@model("entmax", "`entmax15` attention")
def sparse_attention() -> Made:
    from entmax import entmax15

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return (entmax15(self.query(x) @ x.T, dim=-1) @ x - x.roll(1, 0)).square().mean()

    return Made(Net(), points, forward=output)


@model("ptwt, pywavelets", "wavelets of the output in the loss")
def wavelets() -> Made:
    import ptwt

    def forward(net: nn.Module, batch: Any) -> Tensor:
        return sum((part.square().mean() for part in ptwt.wavedec(net(batch[0]), "db2", level=1)), torch.zeros(()))

    return Made(nn.Linear(6, 16), vectors(6, 1), forward=forward)


@model("pykan", "`KAN`")
def kan() -> Made:
    from kan import KAN

    net = KAN(width=[3, 3, 1], grid=3, k=2, auto_save=False, save_act=False, symbolic_enabled=False)
    return Made(net, vectors(3, 1), F.mse_loss)


@model("mambapy", "selective state space in plain PyTorch")
def state_space() -> Made:
    from mambapy.mamba import Mamba, MambaConfig

    net = Mamba(MambaConfig(d_model=8, n_layers=1, d_state=4))
    return Made(
        net, lambda draw, step: torch.randn(2, 5, 8, generator=draw), forward=lambda net, x: net(x).square().mean()
    )


@model("opacus", "`DPMultiheadAttention`")
def private_attention() -> Made:
    from opacus.layers import DPMultiheadAttention

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        return net(x, x, x)[0].square().mean()

    return Made(DPMultiheadAttention(8, 2), lambda draw, step: torch.randn(5, 2, 8, generator=draw), forward=forward)


@model("torchrl, tensordict", "`DQNLoss`, a batch that is a TensorDict")
def values_of_actions() -> Made:
    from tensordict import TensorDict
    from torchrl.modules import QValueActor
    from torchrl.objectives import DQNLoss

    actor = QValueActor(nn.Linear(3, 4), in_keys=["observation"], action_space="one-hot")
    net = DQNLoss(actor, action_space="one-hot", delay_value=False)

    def batch(draw: Generator, step: int) -> Any:
        def x(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw)

        end = torch.zeros(5, 1, dtype=torch.bool)
        after = TensorDict({"observation": x(5, 3), "reward": x(5, 1), "done": end, "terminated": end}, [5])
        action = F.one_hot(torch.randint(4, (5,), generator=draw), 4)
        return TensorDict({"observation": x(5, 3), "action": action, "next": after}, [5])

    return Made(net, batch, forward=lambda net, b: net(b)["loss"])


@model(
    "torchrl, tensordict",
    "`DDPGLoss` with target networks",
    special="at the end of `forward`: `loss._cache.clear()`, and `SoftUpdate`'s `step()`, which would move the module's own",
)
def targets_that_follow() -> Made:
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule
    from torchrl.objectives import DDPGLoss, SoftUpdate

    class Values(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 1)

        def forward(self, observation: Tensor, action: Tensor) -> Tensor:
            return self.linear(torch.cat([observation, action], -1)).square()

    actor = TensorDictModule(nn.Linear(3, 2), ["observation"], ["action"])
    values = TensorDictModule(Values(), ["observation", "action"], ["state_action_value"])
    net = DDPGLoss(actor, values, delay_actor=True, delay_value=True)
    net.make_value_estimator()
    targets = SoftUpdate(net, eps=0.9)

    def batch(draw: Generator, step: int) -> Any:
        def x(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw)

        end = torch.zeros(5, 1, dtype=torch.bool)
        after = TensorDict({"observation": x(5, 3), "reward": x(5, 1), "done": end, "terminated": end}, [5])
        return TensorDict({"observation": x(5, 3), "action": x(5, 2), "next": after}, [5])

    def forward(net: Any, b: Any) -> Tensor:
        terms = net(b.clone())
        net._cache.clear()
        targets.step()
        return terms["loss_actor"] + terms["loss_value"]

    return Made(net, batch, forward=forward)


@model("lightning, torchmetrics", "`training_step` of a `LightningModule`, with a metric")
def training_step() -> Made:
    from lightning import LightningModule
    from torchmetrics import MeanMetric

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.metric = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), MeanMetric()

        def training_step(self, batch: Any, index: int) -> Any:
            loss = F.mse_loss(self.net(batch[0]), batch[1])
            self.metric.update(loss.detach())
            self.log("loss", self.metric)
            return {"loss": loss}

    return Made(Module(), vectors(3, 1), forward=lambda m, b: m.training_step(b, 0)["loss"])


@model(
    "opacus", "`GradSampleModule`", special="a step is not private: clipping and noise are those of opacus's optimizer"
)
def per_sample() -> Made:
    from opacus import GradSampleModule

    return Made(GradSampleModule(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))), vectors(3, 1), F.mse_loss)


@model("torchao", "layers prepared for `QATConfig`", tolerance=1e-2)
def fake_quantized() -> Made:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.qat import QATConfig

    net = nn.Sequential(nn.Linear(32, 32, bias=False), nn.ReLU(), nn.Linear(32, 2, bias=False))
    quantize_(net, QATConfig(Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4), step="prepare"))
    return Made(net, vectors(32, 2), F.mse_loss)


@model("torchao", "frozen layers quantized by `Int8WeightOnlyConfig`")
def quantized_and_frozen() -> Made:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    net = nn.Sequential(nn.Linear(32, 32).requires_grad_(False), nn.Linear(32, 2))
    quantize_(net[0], Int8WeightOnlyConfig())
    return Made(net, vectors(32, 2), F.mse_loss)


@model(
    "keras",
    "`Sequential` with `BatchNormalization`",
    special="`training=True` in the loss, as `train()` switches nothing; `overwritten=` the statistics",
)
def keras_layers() -> Made:
    os.environ["KERAS_BACKEND"] = "torch"
    keras = importlib.import_module("keras")
    keras.utils.clear_session()  # else names are counted on
    keras.utils.set_random_seed(0)
    layers = keras.layers.Dense(8, activation="tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(1)
    net = keras.Sequential([keras.Input((3,)), *layers])
    statistics = tuple(name for name, x in net.named_parameters() if not x.requires_grad)

    def forward(net: Any, batch: Any) -> Tensor:
        return F.mse_loss(net(batch[0], training=True), batch[1])

    return Made(net, vectors(3, 1), forward=forward, overwritten=statistics)


@model("ema-pytorch", "an EMA kept within the module", special="`df.ema` outside of it, or `overwritten=[...]`")
def teacher() -> Made:
    from ema_pytorch import EMA

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 2)
            self.ema = EMA(self.net, beta=0.9, update_after_step=0, update_every=1, include_online_model=False)

        def forward(self, x: Tensor) -> Tensor:
            self.ema.update()
            return (self.net(x) - self.ema(x).detach() - 1).square().mean()

    return Made(Net(), points, forward=output, overwritten=("ema",))


@model("torch_geometric", "`GCNConv(cached=True)`, each worker with its own graph")
def cached_graph() -> Made:
    from torch_geometric.nn import GCNConv

    net = GCNConv(3, 2, cached=True)

    def batch(draw: Generator, step: int) -> tuple[Tensor, Tensor]:
        worker = draw.initial_seed() // 1000  # each has a graph of its own
        return torch.randn(5, 3, generator=draw), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4 * worker]])

    return Made(net, batch, forward=lambda net, b: net(*b).square().mean())
