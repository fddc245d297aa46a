"""torchvision and timm.

The deep networks with BatchNorm and a few images in a batch are in double precision: in four steps they make float32
rounding as large as the update, also between two plain loops that sum in another order.
"""

import torch
from torch.nn import functional as F

from tests.models.registry import Made, case, images


def in_double(made):
    def batch(draw, step):
        first, *rest = made.batch(draw, step)
        return first.double(), *rest

    return made._replace(module=made.module.double(), batch=batch)


@case("torchvision")
def resnet():
    from torchvision.models.resnet import BasicBlock, ResNet

    return in_double(Made(ResNet(BasicBlock, [1, 1, 1, 1], num_classes=4), images(32, count=4), F.cross_entropy))


@case("torchvision", random=True)
def mobilenet_v3():
    from torchvision.models import mobilenet_v3_small

    return in_double(Made(mobilenet_v3_small(weights=None, num_classes=4), images(32, count=4), F.cross_entropy))


@case("torchvision")
def vision_transformer():
    from torchvision.models import VisionTransformer

    module = VisionTransformer(16, 4, 2, 2, 16, 32, num_classes=4)
    torch.nn.init.normal_(module.heads.head.weight, std=0.1)
    return Made(module, images(16), F.cross_entropy)


@case("torchvision", random=True)
def googlenet_with_auxiliary_outputs():
    from torchvision.models import GoogLeNet

    def loss(output, labels):
        main, second, first = output
        return F.cross_entropy(main, labels) + 0.3 * (F.cross_entropy(first, labels) + F.cross_entropy(second, labels))

    module = GoogLeNet(num_classes=4, aux_logits=True, init_weights=False)
    return in_double(Made(module, images(32), loss))


@case("torchvision")
def densenet():
    from torchvision.models import DenseNet

    return Made(DenseNet(4, (2, 2), 8, num_classes=4), images(32, count=8), F.cross_entropy)


@case("torchvision")
def densenet_with_checkpoints():
    from torchvision.models import DenseNet

    return Made(DenseNet(4, (2, 2), 8, num_classes=4, memory_efficient=True), images(32, count=8), F.cross_entropy)


@case("torchvision")
def segmentation():
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    def batch(draw, step):
        return torch.randn(2, 3, 32, 32, generator=draw), torch.randint(3, (2, 32, 32), generator=draw)

    module = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3)
    return in_double(Made(module, batch, lambda output, targets: F.cross_entropy(output["out"], targets)))


@case("torchvision")
def detection():
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    backbone = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=4, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3, stride=2, padding=1)
    )
    backbone.out_channels = 8
    anchors = AnchorGenerator(((8, 16),), ((0.5, 1.0),))

    def batch(draw, step):
        corner = torch.rand(2, 2, 2, generator=draw) * 16
        boxes = torch.cat([corner, corner + 4 + 10 * torch.rand(2, 2, 2, generator=draw)], -1)
        return torch.rand(2, 3, 32, 32, generator=draw), boxes, torch.randint(3, (2, 2), generator=draw)

    def loss(module, batch):
        pictures, boxes, labels = batch
        targets = [{"boxes": b, "labels": c} for b, c in zip(boxes, labels, strict=True)]
        parts = module(list(pictures), targets)
        return sum(parts.values()), {name: part.detach() for name, part in parts.items()}

    module = RetinaNet(backbone, 3, min_size=32, max_size=32, anchor_generator=anchors)
    return Made(module, batch, forward=loss)


@case("timm")
def timm_vit():
    from timm.models import VisionTransformer

    module = VisionTransformer(img_size=16, patch_size=4, num_classes=4, embed_dim=16, depth=2, num_heads=2)
    return Made(module, images(16), F.cross_entropy)


@case("timm")
def timm_vit_with_checkpoints():
    made = timm_vit()
    made.module.set_grad_checkpointing()
    return made


@case("timm", random=True)
def convnext():
    from timm.models import ConvNeXt

    module = ConvNeXt(num_classes=4, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), drop_path_rate=0.2)
    return Made(module, images(32, count=8), F.cross_entropy)


@case("timm", random=True)
def efficientnet():
    import timm

    return Made(
        timm.create_model("test_efficientnet", num_classes=4, drop_rate=0.2), images(32, count=8), F.cross_entropy
    )


@case("timm")
def swin():
    from timm.models import SwinTransformer

    sizes = {"img_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (2, 1), "num_heads": (2, 2)}
    return Made(SwinTransformer(num_classes=4, drop_path_rate=0.0, **sizes), images(16), F.cross_entropy)


@case("timm")
def mixer():
    from timm.models import MlpMixer

    module = MlpMixer(num_classes=4, img_size=16, patch_size=4, num_blocks=2, embed_dim=16)
    torch.nn.init.normal_(module.head.weight, std=0.1)
    return Made(module, images(16), F.cross_entropy)


@case("timm")
def nfnet():
    import timm

    return Made(timm.create_model("test_nfnet", num_classes=4), images(32, count=8), F.cross_entropy)
