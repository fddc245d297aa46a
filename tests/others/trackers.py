"""Trackers of other packages: what can be read back is the mean of the workers, step by step; and files that others read."""

from __future__ import annotations

import csv
import importlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import decentfn as df
from tests.others.rows import Differs, check

STEPS, WORKERS = 5, 3


def losses() -> tuple[list[float], Callable[[Callable[[int, Tensor], None]], Any]]:
    """The mean losses by an equation, and a loop that calls `log(t, mean)` in every step."""
    targets = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64)
    x, expected = torch.zeros(WORKERS, 1, dtype=torch.float64), []
    for _ in range(STEPS):
        expected.append(float((x - targets).square().mean()))
        x = (x - 0.2 * (x - targets)).mean(0, keepdim=True).expand(WORKERS, 1)

    def loop(log: Callable[[int, Tensor], None]) -> Any:
        init, step = df.adapt_then_combine(
            lambda params, b: (params["w"] - b).square().mean(), df.sgd(0.1), df.topology("complete", WORKERS)
        )
        state = df.stack(init({"w": torch.zeros(1, dtype=torch.float64)}), WORKERS)
        step = df.simulate(step, WORKERS)
        for t in range(STEPS):
            state, metrics = step(state, targets, t)
            log(t, df.mean(state, metrics.loss))
        return state

    return expected, loop


def tracker(packages: str, what: str, *, special: str = "") -> Callable[[Any], Any]:
    """Register the function below: it calls `loop(log)` and returns the values that it reads back."""

    def register(function: Callable[[Any], list[float]]) -> Any:
        def attempt() -> None:
            expected, loop = losses()
            found = [float(value) for value in function(loop)]
            if len(found) != STEPS or not torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-5):
                raise Differs(f"read back {found}, the workers' means are {expected}")

        return check("trackers", packages, what, "", special=special)(attempt)

    return register


@tracker("tensorboardX, tensorboard", "`SummaryWriter`")
def tensorboard_x(loop: Any) -> list[float]:
    with importlib.import_module("tensorboardX").SummaryWriter("board") as board:
        loop(lambda t, loss: board.add_scalar("loss", loss, t))
    kind = importlib.import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    events = kind("board")
    events.Reload()
    return [event.value for event in events.Scalars("loss")]


@check("trackers", "wandb", "offline, the last loss in the summary", "")
def wandb() -> None:
    wandb, (expected, loop) = importlib.import_module("wandb"), losses()
    run = wandb.init(mode="offline", dir=os.getcwd(), settings=wandb.Settings(silent=True))
    loop(lambda t, loss: run.log({"loss": loss.item()}, step=t))
    run.finish()
    [path] = Path().glob("wandb/offline-run*/*.wandb")
    if json.dumps(expected[-1]).encode() not in path.read_bytes():
        raise Differs("the last loss is not in the file of the run")


@tracker("mlflow-skinny", "a local store", special="`.item()` for the value")
def mlflow(loop: Any) -> list[float]:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    mlflow = importlib.import_module("mlflow")
    mlflow.set_tracking_uri(Path("runs").resolve().as_uri())
    with mlflow.start_run() as run:
        loop(lambda t, loss: mlflow.log_metric("loss", loss.item(), step=t))
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    return [m.value for m in sorted(history, key=lambda m: m.step)]


@tracker("dvclive", "`Live`", special="`.item()` for the value")
def dvclive(loop: Any) -> list[float]:
    with importlib.import_module("dvclive").Live("live", save_dvc_exp=False, report=None) as live:

        def log(t: int, loss: Tensor) -> None:
            live.log_metric("loss", loss.item())
            live.next_step()

        loop(log)
    [path] = Path("live").rglob("loss.tsv")
    return [float(row["loss"]) for row in csv.DictReader(path.open(), delimiter="\t")]


@tracker("lightning", "`CSVLogger` of Fabric")
def csv_logger(loop: Any) -> list[float]:
    logger = importlib.import_module("lightning.fabric.loggers").CSVLogger(".", "run", flush_logs_every_n_steps=1)
    loop(lambda t, loss: logger.log_metrics({"loss": loss}, t))
    logger.finalize("success")
    [path] = Path().rglob("metrics.csv")
    return [float(row["loss"]) for row in csv.DictReader(path.open())]


@tracker("pandas", "`df.logs.JSONLines`, read by `read_json(lines=True)`")
def json_lines(loop: Any) -> list[float]:
    with df.logs.JSONLines("log.jsonl") as log:
        loop(lambda t, loss: log.write({"loss": loss}, t))
    table = importlib.import_module("pandas").read_json("log.jsonl", lines=True)
    return table["loss"].dropna().tolist()


@tracker("tqdm", "`set_postfix` of the loss")
def bar(loop: Any) -> list[float]:
    made = importlib.import_module("tqdm").tqdm(total=STEPS, file=io.StringIO())
    values = []

    def log(t: int, loss: Tensor) -> None:
        made.set_postfix(loss=loss.item())
        values.append(float(made.postfix.removeprefix("loss=")))
        made.update()

    loop(log)
    return [round_like(v, e) for v, e in zip(values, losses()[0], strict=True)]


def round_like(value: float, exact: float) -> float:
    """The exact value, if the shown one is it with three digits."""
    return exact if abs(value - exact) <= 5e-3 * abs(exact) else value


@tracker("torchmetrics", "`MeanMetric` updated with the workers' means")
def running_mean(loop: Any) -> list[float]:
    metric, values = importlib.import_module("torchmetrics").MeanMetric().double(), []

    def log(t: int, loss: Tensor) -> None:
        metric.update(loss)
        values.append(float(metric.compute()) * (t + 1))

    loop(log)
    return [b - a for a, b in zip([0.0, *values], values, strict=False)]


# -- measures and files -----------------------------------------------------------------------------------------------


def trained(module: nn.Module, batch: Any, **loss: Any) -> Any:
    """Three steps of two workers that begin to differ."""
    params, buffers, loss_fn = df.functional(module, **loss)
    init, step = df.adapt_then_combine(loss_fn, df.sgd(0.1), df.topologies.idle(2))
    state, step = df.stack(init(params, buffers), 2), df.simulate(step, 2)
    for t in range(3):
        state, _ = step(state, batch(t), t)
    return state


@check("trackers", "torchmetrics", "`functional.accuracy` by `df.evaluate`", "")
def accuracy() -> None:
    accuracy = importlib.import_module("torchmetrics.functional").accuracy
    torch.manual_seed(0)
    module = nn.Linear(3, 4)
    draw = torch.Generator().manual_seed(0)
    state = trained(module, lambda t: (torch.randn(2, 8, 3, generator=draw), torch.randint(4, (2, 8), generator=draw)), criterion=F.cross_entropy)  # fmt: skip
    x, y = torch.randn(10, 3, generator=draw), torch.randint(4, (10,), generator=draw)
    *_, metric = df.functional(module, forward=lambda m, b: accuracy(m(b[0]), b[1], task="multiclass", num_classes=4))
    found = float(df.evaluate(metric, state, [(x[:7], y[:7]), (x[7:], y[7:])]))
    mean = {name: p.mean(0) for name, p in df.params(state).items()}
    right = (torch.func.functional_call(module, mean, x).argmax(1) == y).float().mean()
    if abs(found - float(right)) > 1e-6:
        raise Differs(f"{found}, and counted by hand {float(right)}")


def tied() -> nn.Module:
    """A transformer whose output layer is its embedding."""
    t = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = t.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return t.GPT2LMHeadModel(config)


def ids(t: int) -> dict[str, Tensor]:
    made = torch.randint(20, (2, 2, 8), generator=torch.Generator().manual_seed(t))
    return {"input_ids": made, "labels": made}


def same(module: nn.Module, state: Any) -> None:
    """Raise unless a module holds the mean of the workers."""
    named = dict(module.named_parameters())
    for name, p in df.params(state).items():
        if not torch.allclose(named[name], p.mean(0), atol=1e-7):
            raise Differs(f"{name} is not the workers' mean")


@check("trackers", "transformers", "`save_pretrained` of the mean, then `from_pretrained`", "", special="`load_state_dict(df.state_dict(model, state, consensus=True))` first")  # fmt: skip
def pretrained() -> None:
    model = tied()
    state = trained(model, ids)
    model.load_state_dict(df.state_dict(model, state, consensus=True))
    model.save_pretrained("saved")
    same(type(model).from_pretrained("saved"), state)


@check("trackers", "safetensors, transformers", "an exported file with tied weights by `load_model`", "")
def exported() -> None:
    model = tied()
    state = trained(model, ids)
    df.checkpoint.export("model.safetensors", model, state)
    new = tied()
    importlib.import_module("safetensors.torch").load_model(new, "model.safetensors")
    same(new, state)


@check("trackers", "safetensors, transformers", "`save_model`'s file with tied weights by `df.load_state_dict`", "")
def imported() -> None:
    model = tied()
    state = trained(model, ids)
    model.load_state_dict(df.state_dict(model, state, consensus=True))
    importlib.import_module("safetensors.torch").save_model(model, "model.safetensors")
    params, buffers, loss_fn = df.functional(tied())
    one = df.adapt_then_combine(loss_fn, df.sgd(0.1), df.topology("complete", 1)).init(params, buffers)
    one = df.load_state_dict(model, one, df.checkpoint.import_("model.safetensors"))
    for name, p in df.params(one).items():
        if not torch.allclose(p, df.params(state)[name].mean(0), atol=1e-7):
            raise Differs(f"{name} is not the file's")


@check("trackers", "peft, transformers", "adapters saved by `save_pretrained`, then `PeftModel.from_pretrained`", "")
def adapters() -> None:
    peft = importlib.import_module("peft")
    model = peft.get_peft_model(tied(), peft.LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True))
    state = trained(model, ids)
    model.load_state_dict(df.state_dict(model, state, consensus=True))
    model.save_pretrained("saved")
    new = peft.PeftModel.from_pretrained(tied(), "saved")
    same(new, state)


@check("trackers", "ema-pytorch", "`df.ema` equals `EMA` in a plain loop", "")
def moving_average() -> None:
    kind = importlib.import_module("ema_pytorch").EMA
    torch.manual_seed(0)
    module = nn.Linear(3, 1)
    average = kind(module, beta=0.9, update_after_step=-1, update_every=1, inv_gamma=1e-9, power=1.0)
    params, _, loss_fn = df.functional(module, F.mse_loss)
    init, step = df.ema(df.adapt_then_combine(loss_fn, df.sgd(0.1), df.topology("complete", 1)), 0.9)
    state, optimizer = init(params), torch.optim.SGD(module.parameters(), 0.1)
    average.update()
    for t in range(6):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(t))
        state, _ = step(state, (x, x.sum(1, keepdim=True)), t)
        optimizer.zero_grad()
        F.mse_loss(module(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
        average.update()
    for name, p in average.ema_model.named_parameters():
        if not torch.allclose(df.ema_params(state)[name], p, atol=1e-6):
            raise Differs(f"{name}: {df.ema_params(state)[name].tolist()} and {p.tolist()}")
