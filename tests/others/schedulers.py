"""Schedules of other packages by `df.from_torch(make, lr_scheduler)`, against themselves in a plain loop."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.optim import lr_scheduler

from tests.others.harness import scheduler


@scheduler("transformers", "`get_linear_schedule_with_warmup`")
def linear(optimizer: Any) -> Any:
    return importlib.import_module("transformers").get_linear_schedule_with_warmup(optimizer, 3, 12)


@scheduler("transformers", "`get_wsd_schedule`")
def stable(optimizer: Any) -> Any:
    return importlib.import_module("transformers").get_wsd_schedule(optimizer, 3, 4, num_stable_steps=4)


@scheduler("diffusers", "`get_scheduler('cosine_with_restarts')`")
def restarts(optimizer: Any) -> Any:
    make = importlib.import_module("diffusers.optimization").get_scheduler
    return make("cosine_with_restarts", optimizer, num_warmup_steps=2, num_training_steps=12, num_cycles=2)


@scheduler("timm", "`CosineLRScheduler`, called with a number", special="`df.schedules`, or a scheduler of PyTorch")
def of_timm(optimizer: Any) -> Any:
    return importlib.import_module("timm.scheduler").CosineLRScheduler(optimizer, t_initial=12, warmup_t=3)


@scheduler("pytorch-optimizer", "`CosineAnnealingWarmupRestarts`")
def of_collection(optimizer: Any) -> Any:
    kind = importlib.import_module("pytorch_optimizer").CosineAnnealingWarmupRestarts
    return kind(optimizer, first_cycle_steps=6, max_lr=0.1, min_lr=0.01, warmup_steps=2)


@scheduler("monai", "`WarmupCosineSchedule`")
def of_monai(optimizer: Any) -> Any:
    return importlib.import_module("monai.optimizers").WarmupCosineSchedule(optimizer, warmup_steps=3, t_total=12)


@scheduler("lightly", "`CosineWarmupScheduler`")
def of_lightly(optimizer: Any) -> Any:
    return importlib.import_module("lightly.utils.scheduler").CosineWarmupScheduler(optimizer, 3, 12)


@scheduler("pytorch-ignite", "`create_lr_scheduler_with_warmup`", special="`df.schedules`, or a scheduler of PyTorch")
def of_ignite(optimizer: Any) -> Any:
    make = importlib.import_module("ignite.handlers").create_lr_scheduler_with_warmup
    return make(lr_scheduler.StepLR(optimizer, 2, 0.5), warmup_start_value=0.0, warmup_duration=3)


@scheduler("torch", "`SequentialLR` of warmup and cosine")
def in_sequence(optimizer: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, 8)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])


@scheduler("torch", "`OneCycleLR`, which moves betas, too", steps=10)
def one_cycle(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)


@scheduler("torch", "`SWALR` after a step schedule")
def averaging(optimizer: Any) -> Any:
    return torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=4)


@scheduler("torch", "`ReduceLROnPlateau`", special="`df.set_learning_rate(state, rate)` between steps")
def plateau(optimizer: Any) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer)


def accelerated(named: Any) -> Any:
    return torch.optim.SGD(named, lr=0.05, momentum=0.9)


@scheduler("torch", "`CyclicLR`, which moves the momentum, too", make=accelerated)
def cyclic(optimizer: Any) -> Any:
    return lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3)
